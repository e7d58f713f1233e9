"""`ps.verify` finds whatever a policy changes, names it, and leaves everything as it was."""

import os
import random
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from models import WIDTH, Counts, GrowsASet, HandsIn, HasAGenerator, Layer, Net, Seeds, Steered
from support import same
from torch import nn

import pagestash as ps
from pagestash.verifying import runs

RECOMPUTE = ps.Policy([ps.Rule("layers.*", "recompute")])
MIXED = ps.Policy(
    [
        ps.Rule("layers.0", "stash", min_bytes=0),
        ps.Rule("layers.{1-3}", "offload", min_bytes=0, prefetch_bytes=0),
        ps.Rule("layers.*", "recompute"),
    ]
)


def verify(model, policy=RECOMPUTE, optimizer=torch.optim.AdamW, **given):
    optimizer = optimizer and optimizer(model.parameters(), lr=0.1)
    return ps.verify(model, torch.randn(8, WIDTH), policy, optimizer=optimizer, backend="torch", **given)


# --- what is equal, and what is found ---


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, None])
def test_a_policy_that_changes_nothing_is_equal_and_says_what_it_moved(optimizer):
    report = verify(Net(layers=6), MIXED, optimizer)
    assert report.equal, report
    assert set(report.moved) == {"stash", "offload", "recompute"}
    assert str(report).startswith(f"equal to the last bit: {report.results} results of 3 steps")


def test_a_policy_that_moves_nothing_says_so():
    report = verify(Net(), ps.Policy([ps.Rule("layers.*", "offload")]))  # from 1 MiB on
    assert report.equal
    assert "steps; the policy was not seen to move any tensor" in str(report)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Net(GrowsASet), "step 2: the loss"),
        (HandsIn, "buffer shared.running_mean"),
        (lambda: Net(HasAGenerator), "random state layers.0.rng"),
        (lambda: Net(Seeds), "random state"),
    ],
    ids=["attribute", "module of others", "own generator", "seeds"],
)
def test_what_recompute_does_not_promise_is_found_or_refused(make, found):
    report = verify(make())
    assert not report.equal
    if report.refused is None:
        assert found in str(report.difference)
        assert report.rules == RECOMPUTE.rules
        assert len(report.regions) == 1
        assert "likely cause: a replay of its forward did not find, or leave" in str(report)


@pytest.mark.parametrize("prepend", [False, True])
def test_a_hook_that_comes_in_the_step_changes_nothing_or_is_found(prepend):
    report = verify(Steered(prepend), ps.Policy([ps.Rule("layers.*.linear", "recompute")]))
    if report.difference is not None:
        assert report.regions == ("layers.0.linear",)
    plain = Steered(prepend)  # and it is not the hook that makes runs differ by themselves
    assert verify(plain, ps.Policy()).equal


class Faulty(runs.Keeper):
    """Its steps do `fault` at the end of step `at`, if the policy has a rule for `region`."""

    fault, at, region = staticmethod(lambda model: None), 2, "layers.1"

    def attach(self, model, *args, **kwargs):
        self.number, self.model = 0, model
        return super().attach(model, *args, **kwargs)

    @contextmanager
    def step(self, **kwargs):
        with super().step(**kwargs):
            yield
        self.number += 1
        if self.number == self.at and self.policy.rule_for(self.region) is not None:
            with torch.no_grad():
                self.fault(self.model)


def flip(tensor, bit=1):
    tensor.view(-1).view(torch.int32)[3] ^= bit


FAULTS = {
    "gradient layers.1.linear.weight, 1 of 256 elements": lambda m: flip(m.layers[1].linear.weight.grad),
    "parameter layers.2.linear.bias, 1 of 16 elements": lambda m: flip(m.layers[2].linear.bias),
    "buffer layers.0.norm.running_var, 1 of 16 elements": lambda m: flip(m.layers[0].norm.running_var),
    "random state torch's generator (cpu)": lambda m: torch.rand(1),
    "random state the generator of random": lambda m: random.random(),
    "random state the generator of numpy.random": lambda m: np.random.rand(),  # noqa: NPY002
    "attribute layers.1": lambda m: setattr(m.layers[1], "counted", 1),
    "gradient layers.1.norm.bias": lambda m: setattr(m.layers[1].norm.bias, "grad", None),
}


@pytest.mark.parametrize("found", FAULTS)
def test_a_single_bit_is_found_wherever_it_is(found, monkeypatch):
    monkeypatch.setattr(runs, "Keeper", Faulty)
    monkeypatch.setattr(Faulty, "fault", staticmethod(FAULTS[found]))
    report = verify(Net(), optimizer=torch.optim.SGD)
    step = 3 if "attribute" in found else 2
    assert str(report.difference).startswith(f"step {step}: {found}")
    assert report.regions == ("layers.1",)


def test_the_optimizers_state_is_compared(monkeypatch):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)  # with no rate no weight shows it

    def fault(model):
        flip(optimizer.state[model.layers[1].linear.weight]["momentum_buffer"], 1 << 20)

    monkeypatch.setattr(runs, "Keeper", Faulty)
    monkeypatch.setattr(Faulty, "fault", staticmethod(fault))
    report = ps.verify(model, torch.randn(8, WIDTH), RECOMPUTE, optimizer=optimizer, backend="torch")
    assert "optimizer state optimizer.state.layers.1.linear.weight.momentum_buffer" in str(report.difference)
    assert not optimizer.state


def test_zero_and_minus_zero_differ_and_nan_is_compared_by_its_bits(monkeypatch):
    model = Net(layers=2)
    model.register_buffer("odd", torch.tensor([0.0, torch.nan] * 2))
    assert verify(model).equal
    monkeypatch.setattr(runs, "Keeper", Faulty)
    for fault in (lambda m: m.odd.neg_(), lambda m: flip(m.odd, 1)):
        monkeypatch.setattr(Faulty, "fault", staticmethod(fault))
        assert "buffer odd" in str(verify(model).difference)


# --- which rule and region ---


@pytest.mark.parametrize("at_fault", [0, 4, 6])
def test_the_region_is_found_among_many_and_its_rule(at_fault, monkeypatch):
    monkeypatch.setattr(runs, "Keeper", Faulty)
    monkeypatch.setattr(Faulty, "fault", staticmethod(lambda m: flip(m.layers[0].linear.weight.grad)))
    monkeypatch.setattr(Faulty, "region", f"layers.{at_fault}")
    rules = [ps.Rule("layers.{0-3}", "recompute"), ps.Rule("layers.*", "stash", min_bytes=0)]
    report = verify(Net(layers=7), ps.Policy(rules), optimizer=None)
    assert report.regions == (f"layers.{at_fault}",)
    assert report.rules == (rules[at_fault > 3],)


def test_rules_that_differ_only_together_are_all_named(monkeypatch):
    class Both(Faulty):
        @property
        def region(self):
            return "layers.1" if self.policy.rule_for("layers.0") is not None else "nowhere"

    monkeypatch.setattr(runs, "Keeper", Both)
    monkeypatch.setattr(Both, "fault", staticmethod(lambda m: flip(m.layers[0].linear.weight.grad)))
    rules = ps.Rule("layers.0", "recompute"), ps.Rule("layers.1", "stash", min_bytes=0)
    report = verify(Net(layers=2), ps.Policy(rules))
    assert report.rules == rules
    assert report.regions == ("layers.0", "layers.1")


def test_eight_bits_differ_and_the_report_says_why():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    rule = ps.Rule("1", "stash", min_bytes=0, bits=8)
    batch = torch.randn(8, 64, dtype=torch.bfloat16)
    report = ps.verify(model, batch, ps.Policy([rule]), backend="torch")
    assert report.difference.key.kind == "gradient"
    assert report.rules == (rule,)
    assert "bits=8 is lossy" in str(report)


# --- refused ---


def test_a_rule_that_matches_nothing_is_a_result():
    report = verify(Net(), ps.Policy([ps.Rule("layer.*", "recompute")]))
    assert not report.equal
    assert report.refused.startswith("ValueError: rule 'layer.*' matches no region")
    assert str(report).startswith("refused: ValueError")


def test_a_step_that_is_refused_is_a_result():
    class ChangesItsArgument(Layer):
        def forward(self, x):
            return super().forward(x.mul_(2.0))

    class Copies(Net):
        def forward(self, x):
            return sum(layer(x.clone() * 1.0).sum() for layer in self.layers)

    report = verify(Copies(ChangesItsArgument))
    assert report.refused is not None
    assert "layers." in report.refused


def test_an_error_of_the_model_itself_is_raised():
    Counts.ever = 0
    with pytest.raises(RuntimeError, match="broken"):
        verify(Counts(5, RuntimeError("broken")))


# --- as it was ---


def everything(model, optimizer):
    """All that a caller can see."""
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "tensors": [t.detach().clone() for t in tensors],
        "ids": [id(t) for t in tensors],
        "gradients": [(id(t.grad), None if t.grad is None else t.grad.clone()) for t in tensors],
        "flags": [t.requires_grad for t in tensors],
        "training": [m.training for m in model.modules()],
        "hooks": [[len(v) for k, v in vars(m).items() if "hooks" in k] for m in model.modules()],
        "names": [list(vars(m)) for m in model.modules()],
        "calls": list(model.calls),
        "tally": model.tally,
        "state": [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()}
            for s in optimizer.state.values()
        ],
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "torch": torch.get_rng_state(),
        "python": repr(random.getstate()),
        "numpy": repr(np.random.get_state()),  # noqa: NPY002
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
    }


@pytest.mark.parametrize("begun", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize(
    ("fails_in", "error"),
    [
        (None, None),
        (2, RuntimeError("in the first plain run")),
        (8, RuntimeError("under the policy")),
        (5, KeyboardInterrupt()),
        (8, KeyboardInterrupt()),
    ],
)
def test_everything_is_as_it_was(begun, fails_in, error):
    Counts.ever = 0
    model = Counts(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(8, WIDTH)
    if begun:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()  # gradients are left
    model.layers[1].eval()
    model.layers[2].norm.weight.requires_grad_(False)
    before, batch = everything(model, optimizer), x.clone()
    model.fails_in, model.error = fails_in and Counts.ever + fails_in, error
    plain = isinstance(error, KeyboardInterrupt) or fails_in == 2
    with pytest.raises(type(error)) if plain else nullcontext():
        report = ps.verify(model, x, RECOMPUTE, optimizer=optimizer, backend="torch")
        assert (report.refused is not None) == (error is not None)
    assert same(everything(model, optimizer), before)
    assert same(x, batch)
    assert bool(optimizer.state) == begun


def test_what_forward_replaces_is_put_back():
    class Replaces(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.history, self.weights = [], {"scale": torch.ones(WIDTH)}

        def forward(self, x):
            self.mean = self.mean + 1
            self.history.append(float(self.mean[0]))
            self.weights["scale"].add_(1)
            self.new = 3
            return super().forward(x) * self.weights["scale"]

    model = Net(Replaces)
    layer = model.layers[0]
    mean, history, scale = layer.mean, layer.history, layer.weights["scale"]
    assert verify(model, ps.Policy([ps.Rule("layers.*", "stash", min_bytes=0)])).equal
    assert layer.mean is mean
    assert layer.history is history
    assert history == []
    assert same(scale, torch.ones(WIDTH))
    assert same(mean, torch.zeros(WIDTH))
    assert not hasattr(layer, "new")


def test_tensors_of_any_kind_are_copied_and_compared():
    class Odd(Net):
        def __init__(self):
            super().__init__()
            with torch.inference_mode():
                self.register_buffer("inference", torch.ones(4))
            self.register_buffer("wide", torch.ones(1).expand(WIDTH))
            self.register_buffer("empty", torch.zeros(0))
            self.register_buffer("nowhere", torch.empty(3, device="meta"))
            self.register_buffer("conjugate", torch.randn(4, dtype=torch.complex64).conj())
            self.register_buffer("sparse", torch.eye(4).to_sparse())
            self.table, self.last = nn.Embedding(10, WIDTH, sparse=True), None

        def forward(self, x):
            self.last = x * self.wide + self.table(torch.arange(8))  # with its graph
            return super().forward(self.last)

    assert verify(Odd(), optimizer=torch.optim.SGD).equal


def test_a_jagged_batch_is_taken():
    rows = [torch.randn(3, WIDTH), torch.randn(5, WIDTH)]
    batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    policy = ps.Policy([ps.Rule("0", "keep")])
    assert ps.verify(model, batch, policy, loss=lambda y: y.values().sum(), backend="torch").equal


def test_an_optimizer_that_replaces_data_is_undone():
    class Replacing(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data = parameter.data - 0.1 * parameter.grad

    model = Net()
    weight = model.layers[0].linear.weight
    before, address = weight.detach().clone(), weight.data_ptr()
    assert verify(model, optimizer=Replacing).equal
    assert same(weight.detach(), before)
    assert weight.data_ptr() == address


# --- a model that differs by itself ---


class Noisy(Layer):
    """`size` is that of what comes from nowhere."""

    size, unless_deterministic = 1e-6, False

    def forward(self, x):
        if self.unless_deterministic and torch.are_deterministic_algorithms_enabled():
            return super().forward(x)
        return super().forward(x) * (1 + self.size * int.from_bytes(os.urandom(4), "big") / 2**32)


def test_a_model_with_deterministic_algorithms_is_told_to_the_last_bit_by_these(monkeypatch):
    monkeypatch.setattr(Noisy, "unless_deterministic", True)
    report = verify(Net(Noisy, 5), MIXED)
    assert report.equal
    assert report.deterministic
    assert "equal to the last bit with torch's deterministic algorithms" in str(report)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_model_that_differs_all_the_same_is_compared_with_its_spread(monkeypatch):
    report = verify(Net(Noisy), ps.Policy([ps.Rule("layers.*", "stash", min_bytes=0)]))
    assert not report.equal
    assert report.difference is None
    assert report.unsteady.step == 1
    assert report.spread.within
    assert "within their spread" in str(report)

    monkeypatch.setattr(runs, "Keeper", Faulty)
    monkeypatch.setattr(Faulty, "fault", staticmethod(lambda m: m.layers[0].linear.weight.grad.mul_(2.0)))
    report = verify(Net(Noisy), ps.Policy([ps.Rule("layers.*", "stash", min_bytes=0)]))
    assert report.difference is not None
    assert report.regions == ("layers.1",)


def test_the_operation_without_a_deterministic_algorithm_is_named():
    class Puts(Noisy):
        def forward(self, x):
            x.detach().clone().put_(torch.tensor([0]), torch.ones(1))
            return super().forward(x)

    report = verify(Net(Puts), ps.Policy())
    assert report.operations == ("put_",)


def test_times_in_attributes_are_no_difference():
    class Times(Layer):
        def forward(self, x):
            self.seconds = int.from_bytes(os.urandom(8), "big")
            return super().forward(x)

    assert verify(Net(Times, 5), MIXED).equal


# --- what is asked for ---


def test_regions_that_are_no_modules_and_a_loss_are_taken():
    class Opens(Net):
        def forward(self, x):
            with ps.region("inner"):
                return self.layers[0](x).exp()

    report = verify(
        Opens(),
        ps.Policy([ps.Rule("inner", "stash", min_bytes=0)]),
        regions=["inner"],
        loss=lambda y: y.square().sum(),
    )
    assert report.equal
    assert report.moved["stash"] > 0


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"steps": 0}, "steps=0: expected at least 1"),
        ({"policy": "p.toml"}, "p.toml: No such file"),
        ({"graphed": True}, "a CUDA graph needs a model on a GPU"),
        ({"loss": 3}, "loss"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(given, error):
    with pytest.raises((ValueError, TypeError), match=error):
        verify(Net(), **{"policy": RECOMPUTE, **given})


def test_rules_and_a_file_are_taken_for_a_policy(tmp_path):
    (tmp_path / "policy.toml").write_text(RECOMPUTE.to_toml())
    for given in (RECOMPUTE.rules, tmp_path / "policy.toml"):
        assert verify(Net(), policy=given).equal


def test_a_lazy_model_is_refused():
    with pytest.raises(ValueError, match="lazy parameters"):
        ps.verify(nn.Sequential(nn.LazyLinear(4)), torch.ones(2, 3), ps.Policy())
