"""Torch's private API is used in `torch_internals.py` alone, and what is missing there is named."""

import ast
import logging
import operator
import runpy
import subprocess
import sys
import warnings
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from support import same
from support.imports import SOURCE
from torch import nn

import pagestash as ps
from pagestash import torch_internals
from pagestash.commands.step import StepOptions, _from_module
from pagestash.models import Decoder, preset
from pagestash.moe import MoE, MoEConfig
from pagestash.saved.compiled import compile_anew, hidden
from pagestash.saved.region import frames
from pagestash.step.inputs import StaticBatch
from pagestash.torch_internals import TorchInternalMissing, internal, internal_if_called
from pagestash.train.parallel import clip_gradients
from pagestash.train.passes import WholeModel

OWN = "torch_internals.py"
ON_OBJECTS = {
    "_cdata", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
    "_forward_hooks", "_forward_pre_hooks", "_local_tensor", "_sequence_nr", "_scale",
    "_growth_tracker", "_per_optimizer_states", "_stage", "_stages", "_num_stages", "_n_microbatches",
    "_has_backward", "_orig_mod", "_compiled_call_impl", "_step_supports_amp_scaling",
}  # fmt: skip
"""Private attributes of torch's objects; our own have some of these names on `self`."""


PUBLIC_DUNDERS = {"__version__", "__init__", "__name__", "__doc__"}


def is_private(name: str) -> bool:
    return name.startswith("_") and name not in PUBLIC_DUNDERS


def root_of(node: ast.expr) -> str:
    """`a` of `a.b.c`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_uses(text: str) -> list[str]:
    """What a file uses of torch that has no public name."""
    tree = ast.parse(text)
    roots = {"torch"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            roots |= {alias.asname for alias in node.names if alias.name in names and alias.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            roots |= {alias.asname or alias.name for alias in node.names}
        else:
            continue
        found += [name for name in names if any(map(is_private, name.split(".")))]
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(value, ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            roots |= {ast.unparse(each) for each in targets if root_of(value) in roots}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            name = root_of(node)
            of_torch = name in roots and node.attr != "_version"
            of_object = node.attr in ON_OBJECTS and not (isinstance(node.value, ast.Name) and name == "self")
            if of_torch or of_object:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in ON_OBJECTS:
                found.append(ast.unparse(node))
    return found


def test_no_other_module_uses_a_private_name_of_torch():
    found = {
        path.relative_to(SOURCE).as_posix(): uses
        for path in sorted(SOURCE.rglob("*.py"))
        if (uses := private_uses(path.read_text()))
    }
    assert OWN in found
    assert [name for name in found if name != OWN] == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch.utils._pytree import tree_map",
        "from torch.autograd.grad_mode import _unsafe_preserve_version_counter",
        "torch._C._storage_Use_Count(key)",
        "from torch import nn\nnn.modules.module._global_forward_hooks",
        "torch.cuda._sleep(1)",
        "key = tensor.untyped_storage()._cdata",
        "self.model._buffers",
        "getattr(tensor, '_local_tensor', tensor)",
        "torch.autograd.Function.apply.__func__.__code__",
        "from torch import nn\nnn.Module.__dict__",
        "aten: Any = torch.ops.aten\naten._softmax.default",
    ],
)
def test_a_private_use_is_found(line):
    assert private_uses(line)


@pytest.mark.parametrize(
    "line", ["self._buffers = []", "tensor._version", "from torch import nn", "torch.__version__"]
)
def test_what_is_public_is_none(line):
    assert private_uses(line) == []


def test_a_missing_attribute_is_named_with_the_versions():
    with pytest.raises(TorchInternalMissing) as raised:
        internal(torch._C, "_autograd._gone")
    assert str(raised.value) == (
        f"torch {torch.__version__} has no torch._C._autograd._gone, which pagestash uses; "
        "versions checked: 2.11, 2.13, 2.15"
    )


def test_what_few_features_need_is_refused_when_it_is_called():
    gone = internal_if_called(torch.cuda, "_gone")
    with pytest.raises(TorchInternalMissing, match=r"torch\.cuda\._gone"):
        gone(1)


@pytest.mark.parametrize(("version", "lines"), [("2.13.0+cpu", 0), ("9.1.0", 1)])
def test_an_unknown_version_works_and_is_logged(monkeypatch, caplog, version, lines):
    monkeypatch.setattr(torch, "__version__", version)
    with caplog.at_level(logging.DEBUG, "pagestash"):
        names = runpy.run_path(torch_internals.__file__)
    assert len(caplog.records) == lines
    assert names["storage_key"](torch.empty(1)) > 0


WITHOUT = """
import operator, sys, torch
real = operator.attrgetter

class Gone:
    # `attrgetter`, for which torch has none of what torch_internals.py asks for

    def __new__(cls, *paths):
        if not sys._getframe(1).f_code.co_filename.endswith("torch_internals.py"):
            return real(*paths)
        print(paths[0])
        return cls.gone

    def gone(owner):
        raise AttributeError

operator.attrgetter = Gone
import pagestash.torch_internals
operator.attrgetter = real
"""


@pytest.fixture(scope="module")
def details():
    """All private details that are looked up at import, of which none is there."""
    code = WITHOUT + (
        "import pagestash.hf, pagestash.jax, pagestash.cli, pagestash.moe, pagestash.train, pagestash.models\n"
        "import pagestash.pipeline, pagestash.planning, pagestash.profiling, pagestash.step.graphed\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (warning,) = (line for line in done.stderr.splitlines() if "which pagestash uses" in line)
    assert "eval_frame._FrameAction.SKIP" in warning
    return set(done.stdout.split())


@pytest.mark.slow
def test_without_any_private_detail_the_package_imports(details):
    assert details == DETAILS.keys() - set(LATER)


# --- what needs each of them ---


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.act = nn.BatchNorm1d(8), nn.Linear(8, 16), nn.GELU()
        self.down = nn.Linear(16, 8)
        self.norm.table = torch.ones(8)  # a tensor in an attribute

    def forward(self, x):
        return self.down(self.act(self.up(self.norm(x)))).square().sum()


def step():
    """Bytes of every home, twice, against no keeper at all."""
    gradients = []
    for rules in ([], [("norm", "recompute"), ("up", "stash"), ("act", "offload"), ("down", "stash")]):
        net = Layers()
        policy = ps.Policy([ps.Rule(*rule, min_bytes=0) for rule in rules], ps.PoolConfig(page=64))
        keeper = ps.Keeper(policy, backend="torch").attach(net)
        for _ in range(2):
            net.zero_grad()
            with keeper.step():
                net(torch.linspace(-1, 1, 32).view(4, 8)).backward()
        gradients.append([p.grad for p in net.parameters()])
    assert same(*gradients)


def rows():
    class Part(nn.Module):
        def forward(self, x, n):
            return (ps.rows(x, n).sigmoid() * 2.0).tanh()[:3].sum()

    gradients = []
    for home in ("keep", "stash"):
        net = nn.ModuleDict({"part": Part()})
        policy = ps.Policy([ps.Rule("part", home, min_bytes=0)], ps.PoolConfig(page=64, device=1 << 16))
        keeper = ps.Keeper(policy, backend="torch").attach(net)
        x = torch.ones(8, 8, requires_grad=True)
        with keeper.step():
            net["part"](x * 0.5, torch.tensor(3)).backward()
        gradients.append(x.grad)
    assert same(*gradients)


def outside():
    """Outside of a step a keeper counts backwards."""
    net = Layers()
    ps.Keeper(ps.Policy([ps.Rule("act", "stash", min_bytes=0)])).attach(net)
    net(torch.ones(4, 8)).backward()


def touched():
    """A replay raises the version of a weight, whose bytes stay."""

    class Touches(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(1)
            return super().forward(x.sin()).sin()

    net = nn.Sequential(Touches(8, 8))
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", "recompute", min_bytes=0)])).attach(net)
    with keeper.step():
        net(torch.ones(4, 8)).sum().backward()


def experts():
    torch.manual_seed(0)
    layer = MoE(MoEConfig(width=16, expert_width=16, experts=4, top_k=2, capacity=64))
    x = torch.randn(12, 16, requires_grad=True)
    layer(x)[0].square().sum().backward()
    assert x.grad.isfinite().all()


def compiled():
    net = Layers()
    torch.compile(net, backend="eager")(torch.ones(4, 8))
    compile_anew([net])


def profile():
    ps.profile(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.ones(2, 4), repeats=1)


def graphed(net=None):
    net = net or Layers()
    keeper = ps.Keeper(ps.Policy([])).attach(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)

    def train_step(x):
        loss = net(x)
        loss.backward()
        optimizer.step()
        return loss

    ps.GraphedStep(train_step, keeper, optimizer=optimizer)(torch.ones(4, 8))


def batch():
    assert StaticBatch((torch.ones(2),), {}, torch.device("cpu")).arguments


def capacity():
    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.moe = MoE(MoEConfig(width=8, expert_width=8, experts=4, top_k=2, capacity=64))

    graphed(Net())


def budget():
    keeper = ps.Keeper(budget="1MiB").attach(net := Layers())
    with keeper.step():
        net(torch.ones(4, 8)).backward()


def clipping():
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    clip_gradients({parameter: 1}, 1.0, SimpleNamespace(everyone=None))


def accumulation():
    model = Decoder(preset("tiny", layers=1))
    keeper = ps.Keeper(ps.Policy([])).attach(model)
    plan = SimpleNamespace(config=SimpleNamespace(parts=2, overlap=False))
    with keeper.step():
        WholeModel(plan, None, [model], keeper, nullcontext)(torch.zeros(2, 9, dtype=torch.int64))


def made():
    return Layers(), torch.ones(4, 8)


def command():
    _from_module(StepOptions(module=f"{__name__}:made"), torch.device("cpu"))


def on_cuda(name, *arguments):
    return lambda: getattr(torch_internals, name)(*arguments)


autograd, dynamo, functorch = "_autograd.", "_dynamo.eval_frame.", "_functorch."
LATER = [dynamo + name for name in ("_FrameAction.DEFAULT", "_FrameExecStrategy", "set_code_exec_strategy")]
"""Looked up where those before them are there."""
DETAILS = {
    **dict.fromkeys(
        [
            autograd + "_get_sequence_nr",
            autograd + "_pop_saved_tensors_default_hooks",
            autograd + "_push_saved_tensors_default_hooks",
            autograd + "_top_saved_tensors_default_hooks",
            "_buffers",
            "_cdata",
            dynamo + "get_eval_frame_callback",
            "_expired",
            "_forward_hooks",
            "_forward_pre_hooks",
            "_free_weak_ref",
            functorch + "peek_interpreter_stack",
            "_is_zerotensor",
            "_len_torch_dispatch_stack",
            "_modules",
            "_parameters",
            "_weak_ref",
        ],
        step,
    ),
    **dict.fromkeys(
        [
            "TorchDispatchMode",
            "_current_autograd_node",
            "_get_current_dispatch_mode_stack",
            "_pop_mode",
            "_push_mode",
        ],
        rows,
    ),
    "_current_graph_task_id": outside,
    functorch + "is_functorch_wrapped_tensor": outside,
    "_unsafe_preserve_version_counter": touched,
    "_foreach_copy_": step,
    autograd + "_get_current_graph_task_keep_graph": experts,
    "_non_persistent_buffers_set": capacity,
    "_storage_Use_Count": profile,
    **dict.fromkeys([dynamo + "_debug_get_cache_entry_list", dynamo + "reset_code"], compiled),
    dynamo + "_FrameAction.SKIP": lambda: hidden(lambda: None),
    **dict.fromkeys(LATER, lambda: hidden(lambda: None)),
    "tree_leaves": profile,
    "tree_map": graphed,
    **dict.fromkeys(["tree_flatten", "tree_unflatten"], batch),
    "tree_map_only": command,
    "_post_accumulate_grad_hooks": budget,
    **dict.fromkeys(["_foreach_norm", "_foreach_mul_"], clipping),
    "_foreach_div_": accumulation,
    "_cuda_getCurrentRawStream": on_cuda("current_raw_stream", 0),
    "_cuda_getCurrentStream": on_cuda("current_stream_ids", 0),
    "_cuda_getDevice": on_cuda("current_device_index"),
    "_cuda_isCurrentStreamCapturing": on_cuda("stream_captures"),
    "_cuda_setStream": on_cuda("set_stream_ids", 0, 0, 1),
    "_sleep": on_cuda("spin", 1),
    "query": on_cuda("event_query", None),
    "record": on_cuda("event_record", None, None),
    "wait": on_cuda("event_wait", None, None),
}
"""Every detail that is looked up at import, and something that needs it. (Those of CUDA, alone. What is looked up
when it is called is refused by `internal`.)"""


@pytest.fixture(scope="module")
def everything():
    """All modules are imported: one that came later would keep what a test has put in the place of a detail."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        if parts[-1] != "__main__":
            try:
                import_module(".".join(parts).removesuffix(".__init__"))
            except ModuleNotFoundError as missing:  # a framework's adapter, without that framework
                if str(missing.name).startswith("pagestash"):
                    raise


def take_away(path, monkeypatch):
    """Let `torch_internals.py`, and all that has imported from it, be as if torch had no `path`."""

    real = operator.attrgetter
    monkeypatch.setattr(operator, "attrgetter", lambda *paths: gone if paths == (path,) else real(*paths))

    def gone(owner):
        raise AttributeError

    fresh = runpy.run_path(torch_internals.__file__)
    monkeypatch.setattr(operator, "attrgetter", real)
    changed = {name: value for name, value in vars(torch_internals).items() if fresh.get(name) is not value}
    for module in [each for name, each in sys.modules.items() if name.partition(".")[0] == "pagestash"]:
        for name, value in list(vars(module).items()):
            for known, old in changed.items():
                if value is old and (name == known or (callable(old) and not name.startswith("__"))):
                    monkeypatch.setattr(module, name, fresh[known])


@pytest.mark.parametrize("path", DETAILS)
def test_what_is_missing_is_refused_or_lost_by_name(path, monkeypatch, everything):
    """What needs it says which versions have it, or works all the same, with a warning."""
    take_away(path, monkeypatch)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            DETAILS[path]()
        except ImportError as error:
            told = [str(error)]
        else:
            told = [str(warning.message) for warning in seen]
    assert frames() == ()
    monkeypatch.undo()
    assert torch_internals.top_saved_tensors_hooks(True) is None
    assert any(f"{path}, which pagestash uses; versions checked: 2.11, 2.13, 2.15" in each for each in told)


@pytest.mark.parametrize("path", [path for path, needs in DETAILS.items() if needs is not step])
def test_a_plain_step_needs_none_of_the_others(path, monkeypatch, everything):
    take_away(path, monkeypatch)
    step()


def test_both_keys_of_a_storage_are_one():
    tensor = torch.empty(3)
    assert torch_internals.storage_key(tensor[1:]) == torch_internals.key_of_storage(tensor.untyped_storage())


def test_a_keeper_loads_neither_dynamo_nor_pipelining():
    """Each takes a second or two, and only those who compile or have a pipeline need it."""
    code = "import sys, pagestash.step.graphed, pagestash.profiling; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "pagestash.saved.keeper" in loaded
    assert not {"torch._dynamo", "torch.distributed.pipelining"} & set(loaded)
