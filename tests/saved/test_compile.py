"""`torch.compile` beside a keeper: same bits, no graph break of ours, and a refusal by name inside a graph."""

import functools
import shutil

import pytest
import torch
from support import same
from support.tiers import slow
from torch import nn
from torch._dynamo.utils import counters

import pagestash as ps
from pagestash.moe import MoE, MoEConfig

BACKENDS = ["eager", "aot_eager"]
HOMES = ["stash", "offload", "recompute"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)) ** 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


class Breaking(Model):
    """A model that breaks its graph itself, as many do."""

    def forward(self, x):
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x.square().sum()


def fresh():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh():
    fresh()
    yield
    torch._dynamo.reset()


def keeper(match, home):
    rule = ps.Rule(match, home, min_bytes=0)
    if home == "offload":
        rule = ps.Rule(match, home, min_bytes=0, prefetch_bytes=0)
    return ps.Keeper(ps.Policy([rule], ps.PoolConfig(page=64)), backend="torch")


def gradients(model, run, kept=None, steps=3):
    """Of each step, the same batch each time."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(steps):
        model.zero_grad()
        if kept is None:
            run(x).backward()
        else:
            with kept.step():
                run(x).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def breaks():
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


@functools.cache
def without_keeper(make, *settings):
    """Gradients of the model and step that `make` gives, and its breaks; the same for every home and rule."""
    fresh()
    model, run = make(*settings)
    plain = gradients(model, run), breaks()
    fresh()
    return plain


def one_layer_compiled(backend):
    model = Model()
    model.layers[1] = torch.compile(model.layers[1], backend=backend, fullgraph=True)
    return model, model


def one_layer_compiled_in_place(backend):
    model = Model()
    model.layers[1].compile(backend=backend)
    return model, model


def breaking(backend):
    model = Breaking()
    return model, torch.compile(model, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("home", HOMES)
def test_a_compiled_layer_beside_one_with_a_rule(backend, home):
    plain, expected = without_keeper(one_layer_compiled, backend)
    model, _ = one_layer_compiled(backend)
    kept = keeper("layers.0", home).attach(model)
    assert same(gradients(model, model, kept), plain)
    assert breaks() == expected
    assert kept.stats().regions["layers.0"].peak > 0


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("match", ["layers.1", *slow("layers.*", "layers.**")])
def test_a_rule_that_names_the_compiled_module_itself_holds(home, match):
    plain, expected = without_keeper(one_layer_compiled, "aot_eager")
    model, _ = one_layer_compiled("aot_eager")
    kept = keeper(match, home).attach(model)
    assert same(gradients(model, model, kept, steps=1), plain[:1])
    assert kept.stats().homes[home].peak > 0
    assert same(gradients(model, model, kept, steps=2), plain[1:])
    assert sum(counters["graph_break"].values()) == 0
    assert breaks()[1] <= expected[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("home", ["stash", *slow("offload")])
def test_a_layer_compiled_after_attach_holds_its_rule(backend, home):
    model = Model()
    plain = gradients(model, model)
    kept = keeper("layers.1", home).attach(model)
    model.layers[1] = torch.compile(model.layers[1], backend=backend)
    found = gradients(model, model, kept, steps=1)
    assert kept.stats().homes[home].peak > 0
    found += gradients(model, model, kept, steps=2)
    assert all(torch.allclose(a, b) for one, other in zip(found, plain) for a, b in zip(one, other))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("home", ["recompute", *slow("stash", "offload")])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rule_inside_a_compiled_model_is_refused_by_name(backend, home, when):
    model = Model()
    if when == "before":
        compiled = torch.compile(model, backend=backend)
        with pytest.raises(
            ValueError, match=r"names 'layers\.1\.up', which is inside the model.*torch\.compile"
        ):
            keeper("layers.1.up", home).attach(compiled)
        return
    kept = keeper("layers.1.up", home).attach(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with pytest.raises(RuntimeError, match=r"'layers\.1\.up', which runs inside torch\.compile"):
        gradients(model, compiled, kept, steps=1)
    assert sum(counters["graph_break"].values()) == 0


def test_a_model_that_ran_compiled_before_attach_is_refused_by_name():
    """Dynamo does not notice that a module inside its graph has got a hook."""
    model = Model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    gradients(model, compiled, steps=1)
    kept = keeper("layers.1", "stash").attach(model)
    with pytest.raises(RuntimeError, match=r"'layers\.1', which runs inside torch\.compile"):
        gradients(model, compiled, kept, steps=1)


def test_a_rule_inside_a_compiled_layer_is_refused_by_name():
    model = Model()
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    with pytest.raises(
        ValueError, match=r"'layers\.1\.up', which is inside 'layers\.1'.*name 'layers\.1' in"
    ):
        keeper("layers.1.up", "stash").attach(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("home", [*slow("stash"), "offload"])
def test_a_layer_compiled_in_place_holds_its_rule(backend, home):
    plain, _ = without_keeper(one_layer_compiled_in_place, backend)
    model, _ = one_layer_compiled_in_place(backend)
    kept = keeper("layers.1", home).attach(model)
    assert same(gradients(model, model, kept, steps=1), plain[:1])
    assert kept.stats().homes[home].peak > 0
    assert same(gradients(model, model, kept, steps=2), plain[1:])


@pytest.mark.parametrize("when", ["before", "after"])
def test_recompute_of_a_layer_compiled_in_place_is_refused_by_name(when):
    model = Model()
    if when == "before":
        model.layers[1].compile(backend="eager")
        with pytest.raises(ValueError, match=r"'layers\.1' was compiled by layers\.1\.compile\(\)"):
            keeper("layers.1", "recompute").attach(model)
        return
    kept = keeper("layers.1", "recompute").attach(model)
    model.layers[1].compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"'layers\.1' runs inside torch\.compile"):
        gradients(model, model, kept, steps=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("home", ["stash", *slow("offload")])
def test_a_model_that_breaks_its_graph_breaks_it_no_more_often(backend, home):
    """Between the graphs hooks run as they are, and regions are told apart."""
    plain, expected = without_keeper(breaking, backend)
    model, compiled = breaking(backend)
    kept = keeper("layers.*", home).attach(model)
    assert same(gradients(model, compiled, kept), plain)
    assert breaks() == expected
    assert set(kept.stats().regions) >= {"layers.0", "layers.1", "layers.2"}


def test_recompute_between_the_graphs_of_a_compiled_model_is_refused_by_name():
    model = Breaking()
    kept = keeper("layers.*", "recompute").attach(model)
    with pytest.raises(RuntimeError, match=r"'layers\.0' runs inside torch\.compile"):
        gradients(model, torch.compile(model, backend="eager"), kept, steps=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_without_a_rule_inside_keeps_what_it_saves(backend):
    """Here all of the model is one graph; another model beside it has the rule."""
    model, other = Model(), nn.Sequential(Layer())
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    plain = gradients(model, lambda x: compiled(other(x)))
    kept = keeper("0", "stash").attach(other)
    assert same(gradients(model, lambda x: compiled(other(x)), kept), plain)
    assert kept.stats().homes["keep"].bytes == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_bits():
    model = Model()
    model.layers[1] = torch.compile(model.layers[1], fullgraph=True)
    plain = gradients(model, model)
    for home in ("stash", "offload", "recompute"):
        kept = keeper("layers.*", home).attach(model)
        assert same(gradients(model, model, kept), plain)
        assert kept.stats().homes[home].peak > 0
        kept.detach()


def test_a_profile_of_a_compiled_model_runs():
    model = Breaking()
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    compiled = torch.compile(model, backend="aot_eager")
    result = ps.profile(compiled, (torch.randn(4, 8),), loss=lambda out: out)
    assert result.tensors


class MoENet(nn.Module):
    """Layers of our own, whose kernels no compiler looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoEBlock() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


class MoEBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.moe = MoE(MoEConfig(width=8, expert_width=8, experts=4, top_k=2))

    def forward(self, x):
        return x + self.moe(self.norm(x))[0]


def moe(what):
    model = run = MoENet()
    if what == "model":
        run = torch.compile(model, backend="aot_eager")
    elif what == "layer":
        model.layers[0] = torch.compile(model.layers[0], backend="aot_eager")
    elif what == "norm":
        model.layers[0].norm = torch.compile(model.layers[0].norm, backend="aot_eager")
    else:
        model.layers[0].moe.experts = torch.compile(model.layers[0].moe.experts, backend="aot_eager")
    return model, run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["layer", *slow("model", "norm", "experts")])
@pytest.mark.parametrize(
    ("match", "home"),
    [
        ("layers.*.moe.experts", "stash"),
        ("layers.*.moe", "recompute"),
        ("layers.*", "stash"),
        ("layers.*", "offload"),
        ("layers.*", "recompute"),
    ],
)
def test_moe_layers_and_what_is_compiled_of_them(what, match, home):
    """Gradients are right, or the rule is refused by name; a graph ends before experts that a rule names."""
    plain, expected = without_keeper(moe, what)
    model, run = moe(what)
    if what == "layer" and ".moe" in match:
        with pytest.raises(ValueError, match=r"which is inside 'layers\.0'"):
            keeper(match, home).attach(model)
        return
    kept = keeper(match, home).attach(model)
    if what == "model" and not match.endswith("experts"):  # it is one graph
        with pytest.raises(RuntimeError, match=r"runs inside torch\.compile"):
            gradients(model, run, kept)
        return
    assert same(gradients(model, run, kept), plain)
    if home != "recompute" and not match.endswith(
        "experts"
    ):  # which runs it a second time, and with other guards
        assert breaks()[0] == expected[0]
