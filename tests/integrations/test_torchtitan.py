"""torchtitan's own training with our experts and under a policy: losses, norms and weights are those without.

All runs are torchtitan's `train.main()` on a CPU (`titan/train.py`).
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
HERE = Path(__file__).parent / "titan"
sys.path.insert(0, str(HERE))

import small  # noqa: E402
from support.compare import same  # noqa: E402
from support.pages import ROOT, blocks  # noqa: E402
from torchtitan.config import derive  # noqa: E402
from torchtitan.distributed.activation_checkpoint import SelectiveAC  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts  # noqa: E402
from torchtitan.models.common.token_dispatcher import (  # noqa: E402
    AllToAllTokenDispatcher,
    HybridEPTokenDispatcher,
)
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts  # noqa: E402

from pagestash.integrations import torchtitan as ours  # noqa: E402

EXPERTS = "pagestash.integrations.torchtitan.experts"
POLICY = 'pagestash.integrations.torchtitan.policy={"path": "policy.toml"}'
BUDGET = 'pagestash.integrations.torchtitan.policy={"budget": "60%"}'
LAYERS = """
[[rule]]
match = "layers.*"
home = "{home}"
{more}
"""
COMPILED = ("--compile.enable", "--compile.components", "model", "--compile.backend", "aot_eager")
ACCUMULATE = ("--training.global_batch_size", "4")
PARALLEL = {
    "FSDP2": (),
    "experts on two ranks": ("--parallelism.expert_parallel_degree", "2"),
    "1F1B": ("--parallelism.pipeline_parallel_degree", "2"),
    "interleaved 1F1B": (
        *("--parallelism.pipeline_parallel_degree", "2"),
        *("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
    ),
}
ATTENTION = {"qwen3": "small.sdpa", "deepseek": "small.sdpa", "gptoss": "small.math_attention"}
SAVED = ("--checkpoint.enable", "--checkpoint.interval", "3", "--checkpoint.folder")
FROM = "--checkpoint.initial_load_path"
OFF = "activation-checkpoint:none"
"""Compiled, torchtitan's checkpointing counts tokens once, and its optimizer halves them all the same."""
BLOCKS = """
[pool]
page = "4KiB"

[[rule]]
match = "layers.1"
home = "stash"
min_bytes = 0

[[rule]]
match = "layers.*"
home = "offload"
min_bytes = 0
prefetch_bytes = 0
"""


def whole(home):
    """The policy that gives whole layers this home."""
    return POLICY.replace("policy.toml", f"{home}.toml")


RUNS = {
    1: {
        **{f"{model} stock": (model, [], ()) for model in ATTENTION},
        **{f"{model} ours": (model, [EXPERTS], ()) for model in ATTENTION},
        **{f"{model} kept": (model, [EXPERTS, POLICY], ()) for model in ATTENTION},
        "offload": ("qwen3", [whole("offload")], ()),
        "recompute": ("qwen3", [whole("recompute")], ()),
        "planned": ("qwen3", [EXPERTS, BUDGET], ()),
        "compiled stock": ("deepseek", [], (*COMPILED, OFF)),
        "compiled stock kept": ("deepseek", [whole("blocks")], COMPILED),
        **{f"{model} compiled ours": (model, [EXPERTS], (*COMPILED, OFF)) for model in ATTENTION},
        **{
            f"{model} compiled ours kept": (model, [EXPERTS, whole("blocks")], COMPILED)
            for model in ATTENTION
        },
        "saved by ours": ("qwen3", [EXPERTS], (*SAVED, "ours")),
        "saved by stock": ("qwen3", [], (*SAVED, "stock")),
        "loaded by stock": ("still", [], (*SAVED, "stock after ours", FROM, "{folder}/outputs/ours/step-3")),
        "loaded by ours": (
            "still",
            [EXPERTS],
            (*SAVED, "ours after stock", FROM, "{folder}/outputs/stock/step-3"),
        ),
        "accumulated ours": ("qwen3", [EXPERTS], ACCUMULATE),
        "accumulated kept": ("qwen3", [EXPERTS, POLICY], ACCUMULATE),
    },
    2: {
        f"{name} {run}": ("qwen3", overrides, settings)
        for name, settings in PARALLEL.items()
        for run, overrides in (("ours", [EXPERTS]), ("kept", [EXPERTS, POLICY]))
    },
}
"""By number of ranks and name: the model, overrides and settings."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What a run by that name has left: steps, weights and bytes in homes of each rank."""
    folder = tmp_path_factory.mktemp("titan")
    small.assets(folder)
    (folder / "policy.toml").write_text((ROOT / "examples" / "torchtitan.toml").read_text())
    for home in ("offload", "recompute"):
        more = "min_bytes = 0\nprefetch_bytes = 0" if home == "offload" else ""
        (folder / f"{home}.toml").write_text(LAYERS.format(home=home, more=more))
    (folder / "blocks.toml").write_text(BLOCKS)

    @cache
    def start(ranks):
        place = os.pathsep.join([str(ROOT / "src"), str(HERE)])
        # (Not our kernels, interpreted, as the tests of this process have them: they take minutes.)
        quiet = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", "WANDB_MODE": "disabled"}
        (folder / "runs.json").write_text(
            json.dumps({name: arguments(*run, folder) for name, run in RUNS[ranks].items()})
        )
        done = subprocess.run(
            [sys.executable, str(HERE / "train.py"), "runs.json", str(ranks)],
            cwd=folder,
            env={**os.environ, **quiet, "PYTHONPATH": place},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]

    def found(name, ranks=1):
        start(ranks)
        told = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]
        return SimpleNamespace(
            steps=[each["steps"] for each in told],
            weights=[torch.load(folder / f"{name}.{rank}.pt") for rank in range(ranks)],
            homes=[each["homes"] for each in told],
        )

    return found


def arguments(model, overrides, settings, folder):
    settings = [each.format(folder=folder) for each in settings]
    return [
        *(
            "--module",
            "small",
            "--config",
            model,
            "--override.imports",
            ATTENTION.get(model, "small.sdpa"),
            *overrides,
        ),
        *("--training.local_batch_size", "2", "--training.seq_len", "64", "--training.steps", "3"),
        *("--training.disable_cuda_graphs", "--debug.seed", "0", "--debug.deterministic", *settings),
        *(() if OFF in settings else ("activation-checkpoint:selective",)),
    ]


def losses(run):
    return torch.tensor([float.fromhex(loss) for loss, _ in run.steps[0]])


def check(plain, kept, homes=("stash", "offload", "recompute")):
    assert len(plain.steps[0]) == 3
    assert kept.steps == plain.steps
    assert same(kept.weights, plain.weights)
    for home in homes:  # (the last stage of a pipeline keeps what its backward asks for at once)
        assert any(each[home] > 0 for each in kept.homes), home


@pytest.mark.parametrize("model", ATTENTION)
def test_losses_norms_and_weights_are_those_without_a_policy_and_losses_those_of_stock(runs, model):
    stock, plain, kept = (runs(f"{model} {run}") for run in ("stock", "ours", "kept"))
    check(plain, kept)
    assert kept.weights[0].keys() == stock.weights[0].keys()  # the names that stock's checkpoints have
    torch.testing.assert_close(losses(plain), losses(stock), rtol=0.02, atol=0)  # experts are in bf16
    torch.testing.assert_close(losses(plain)[0], losses(stock)[0], rtol=1e-3, atol=0)


@pytest.mark.parametrize("home", ["offload", "recompute"])
def test_a_policy_holds_for_stock_experts(runs, home):
    check(runs("qwen3 stock"), runs(home), [home])


def test_a_budget_is_planned_for(runs):
    check(runs("qwen3 ours"), runs("planned"), ["recompute"])


def test_whole_blocks_are_compiled(runs):
    check(runs("compiled stock"), runs("compiled stock kept"), ["stash", "offload"])


@pytest.mark.parametrize("model", ATTENTION)
def test_whole_blocks_with_our_experts_are_compiled(runs, model):
    """`--compile.enable` makes one graph of each block."""
    plain = runs(f"{model} compiled ours")
    check(plain, runs(f"{model} compiled ours kept"), ["stash", "offload"])
    torch.testing.assert_close(losses(plain), losses(runs(f"{model} ours")), rtol=1e-3, atol=0)


def test_gradients_accumulate(runs):
    check(runs("accumulated ours"), runs("accumulated kept"))


@pytest.mark.parametrize("name", PARALLEL)
def test_two_ranks(runs, name):
    check(runs(f"{name} ours", 2), runs(f"{name} kept", 2))


# --- checkpoints ---


@pytest.mark.parametrize(("saved", "loaded"), [("ours", "stock"), ("stock", "ours")])
def test_the_weights_that_one_has_saved_on_disk_the_other_loads(runs, saved, loaded):
    """And trains at a rate of 0, at which the bias of a router moves all the same."""
    written, read = runs(f"saved by {saved}"), runs(f"loaded by {loaded}")
    assert len(read.steps[0]) == 3
    weights = {name for name in written.weights[0] if not name.endswith("expert_bias_E")}
    assert read.weights[0].keys() == written.weights[0].keys() > weights
    assert all(torch.equal(read.weights[0][name], written.weights[0][name]) for name in weights)


def configs():
    shape = {"dim": 32, "hidden_dim": 16, "num_experts": 4}
    for inner in (GroupedExperts.Config(**shape), GptOssGroupedExperts.Config(**shape)):
        dispatcher = AllToAllTokenDispatcher.Config(num_experts=4, top_k=2)
        yield RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher)


@pytest.mark.parametrize("config", list(configs()), ids=["GroupedExperts", "GptOssGroupedExperts"])
def test_weights_go_to_stock_experts_and_back(config):
    theirs, mine = config.build(), ours.experts(config).build()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    mine.load_state_dict(theirs.state_dict())
    again = config.build()
    again.load_state_dict(mine.state_dict())
    assert same(dict(again.state_dict()), dict(theirs.state_dict()))


# --- refusals ---


def test_dispatchers_and_experts_of_another_kind_are_refused():
    config = next(configs())
    hybrid = HybridEPTokenDispatcher.Config(num_experts=4, top_k=2)
    with pytest.raises(ValueError, match=r"HybridEPTokenDispatcher\.Config"):
        ours.experts(derive(config, RoutedExperts.Config, token_dispatcher=hybrid))

    class Other(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    inner = Other.Config(dim=32, hidden_dim=16, num_experts=4)
    with pytest.raises(ValueError, match="computes something of its own"):
        ours.experts(derive(config, RoutedExperts.Config, inner_experts=inner))


@pytest.mark.parametrize("asked", [{}, {"path": "policy.toml", "budget": "1GiB"}])
def test_a_policy_needs_a_path_or_a_budget(asked):
    with pytest.raises(ValueError, match="one of them"):
        ours.policy(SelectiveAC.Config(), **asked)


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"path": "nowhere.toml"}, "nowhere.toml: No such file"), ({"budget": "much"}, "budget='much'")],
)
def test_what_is_wrong_with_a_policy_is_said_before_a_model_is_made(asked, said):
    with pytest.raises(ValueError, match=said):
        ours.policy(SelectiveAC.Config(), **asked)


def trainer_of(checkpoint, *, graphs=False):
    config = SimpleNamespace(
        activation_checkpoint=checkpoint,
        override=SimpleNamespace(imports=["small.sdpa", ("pagestash.integrations.torchtitan.policy", {})]),
        training=SimpleNamespace(disable_cuda_graphs=not graphs),
    )
    return SimpleNamespace(config=config)


def test_a_policy_that_nothing_was_replaced_for_is_refused():
    with pytest.raises(ValueError, match="activation-checkpoint:selective"):
        ours.keeper_of(trainer_of(None))


def test_a_policy_in_a_cuda_graph_is_refused():
    with pytest.raises(ValueError, match=r"--training\.disable_cuda_graphs"):
        ours.keeper_of(trainer_of(ours.Homes.Config(path="policy.toml"), graphs=True))


@pytest.mark.parametrize(
    ("match", "home", "said"),
    [
        ("layers.*", "recompute", r"was compiled by layers\.0\.compile\(\)"),
        ("layers.*.attention", "offload", "torch.compile makes one graph of that"),
    ],
)
def test_what_needs_to_look_into_a_compiled_block_is_refused(tmp_path, match, home, said):
    block, model = torch.nn.Module(), torch.nn.Module()
    block.attention = torch.nn.Linear(4, 4)
    block.compile(backend="aot_eager", fullgraph=True)
    model.layers = torch.nn.ModuleDict({"0": block})
    (tmp_path / "policy.toml").write_text(f'[[rule]]\nmatch = "{match}"\nhome = "{home}"\n')
    trainer = trainer_of(ours.Homes.Config(path=str(tmp_path / "policy.toml")))
    trainer.model_parts, trainer.parallel_dims = [model], SimpleNamespace(pp_enabled=False)
    with pytest.raises(ValueError, match=said):
        ours.keeper_of(trainer)


# --- the page ---


def test_the_page_names_what_is_there():
    (command,) = (text for _, text in blocks("docs/torchtitan.md", "bash") if "torchrun" in text)
    assert EXPERTS in command
    assert POLICY in command
