"""A rule that moves nothing is named once, with the reason; one that moves something is not."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pagestash as ps
from pagestash.moe import AllGather, MoE, MoEConfig
from pagestash.saved.fused import claim


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.a(x)) ** 2


def net(depth=2):
    return nn.Sequential(*(Part() for _ in range(depth)))


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.WARNING, logger="pagestash")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "pagestash"]


def train(model, *rules, steps=4, forward=None, **pool):
    kept = ps.Keeper(ps.Policy(list(rules), ps.PoolConfig(page=64, **pool)), backend="torch").attach(model)
    for _ in range(steps):
        with kept.step():
            (forward or model)(torch.randn(8, 16, requires_grad=True)).sum().backward()
    return kept


@pytest.mark.parametrize("home", ["stash", "recompute"])
def test_a_rule_that_moves_something_is_not_mentioned(told, home):
    model = net()
    count = torch.tensor([3])
    rules = ps.Rule("*", home, min_bytes=0), ps.Rule("*.a", "keep")
    train(model, *rules, forward=lambda x: model(ps.rows(x, count))[:3])
    assert told() == []


def test_a_stash_of_tensors_whose_rows_are_all_valid_is_named(told):
    train(net(), ps.Rule("*", "stash", min_bytes=0))
    (line,) = told()
    assert line.startswith(
        "rule '*' (stash) made nothing smaller in 2 steps: no tensor under it has fewer valid rows"
    )


class Scaled(nn.Module):
    """Saves its input, and nobody saves its result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * self.weight


class Shifted(nn.Module):
    def forward(self, x):
        return (x + 1.0).exp()


def test_what_another_rule_recomputes_does_not_count_for_this_one(told):
    model = nn.Sequential(nn.LayerNorm(16), Part())
    train(model, ps.Rule("0", "recompute"), ps.Rule("1", "offload"))
    (line,) = told()
    assert line.startswith("rule '1' (offload) moved nothing in 2 steps: its largest saved tensor has 512 B")


def test_a_rule_whose_tensors_another_recomputes_is_not_mentioned(told):
    train(
        nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)), ps.Rule("0", "recompute"), ps.Rule("1", "offload")
    )
    assert told() == []


def test_a_rule_for_what_makes_the_input_of_a_recomputed_region_is_not_mentioned(told):
    """Its result is made again, too, and held nowhere."""
    layers = nn.Sequential(*(nn.Sequential(Scaled(), Shifted()) for _ in range(3)))
    train(layers, *(ps.Rule(f"1.{part}", "recompute", min_bytes=0) for part in (0, 1)))
    assert told() == []
    train(layers, ps.Rule("1.0", "recompute", min_bytes=0))
    assert len(told()) == 1


def test_an_offload_rule_that_moves_something_is_not_mentioned(told):
    train(net(4), ps.Rule("*", "offload", min_bytes=0, prefetch_bytes=0))
    assert told() == []


def test_tensors_below_min_bytes(told):
    train(net(), ps.Rule("*", "stash"))
    (line,) = told()
    assert line == (
        "rule '*' (stash) moved nothing in 2 steps: its largest saved tensor has 512 B, and min_bytes is 64.0 KiB"
    )


def test_all_within_the_window(told):
    train(net(), ps.Rule("*", "offload", min_bytes=0))
    (line,) = told()
    assert line.startswith(
        "rule '*' (offload) moved nothing in 2 steps: all that it saves is within the window"
    )


def test_no_host_memory(told):
    train(net(4), ps.Rule("*", "offload", min_bytes=0, prefetch_bytes=0), host=0)
    assert any(
        "rule '*' (offload) moved nothing in 2 steps: there is no host memory" in line for line in told()
    )


def test_kept_by_another_region(told):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.second = nn.Linear(16, 16)

        def forward(self, x):
            return self.first(x) + self.second(x)

    train(Both(), ps.Rule("first", "keep"), ps.Rule("second", "stash", min_bytes=0))
    (line,) = told()
    assert line == (
        "rule 'second' (stash) moved nothing in 2 steps: region 'first' saves the same tensors, and keeps them; "
        "give that a rule, too"
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_owns_the_layer(told, reentrant):
    """The reentrant kind runs forward again in backward, here in the same thread, and what is saved then moves."""
    model = net()

    def forward(x):
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    train(model, ps.Rule("*", "recompute"), forward=forward)
    if reentrant:
        assert told() == []
        return
    (line,) = told()
    assert line.startswith("rule '*' (recompute) moved nothing in 2 steps: gradient checkpointing")


def test_nothing_to_compact(told):
    class Known(nn.Module):
        def forward(self, x):
            y = x * 2
            claim(None, y, sized=True)
            return y.square()

    train(nn.Sequential(Known()), ps.Rule("0", "stash", min_bytes=0))
    (line,) = told()
    assert line.endswith("its tensors have a known size, so that there is nothing to compact")


def test_a_region_that_never_ran(told):
    model = net()
    train(model, ps.Rule("0", "recompute"), ps.Rule("1", "stash", min_bytes=0), forward=model[0])
    (line,) = told()
    assert line.startswith("rule '1' (stash) moved nothing in 2 steps: none of its regions ('1' for one) ran")


def test_a_region_that_ran_without_gradients(told):
    model = net()

    def forward(x):
        with torch.no_grad():
            model[1](x)
        return model[0](x)

    train(model, ps.Rule("0", "recompute"), ps.Rule("1", "stash", min_bytes=0), forward=forward)
    (line,) = told()
    assert "ran without gradients only" in line


def test_the_wrong_device(told):
    """As under FSDP's offload of weights: they are on the host, what is computed is not."""
    model = net()
    kept = ps.Keeper(ps.Policy([ps.Rule("*", "stash", min_bytes=0)]), backend="torch").attach(model)
    for _ in range(2):
        with kept.step():
            kept._saved.device = torch.device("meta")
            model(torch.randn(8, 16, requires_grad=True)).sum().backward()
            kept._saved.device = torch.device("cpu")
    (line,) = told()
    assert line.endswith("its tensors are on cpu, and the model on meta")


def test_passes_without_gradients_are_no_steps(told):
    model = net()
    kept = ps.Keeper(ps.Policy([ps.Rule("*", "stash")]), backend="torch").attach(model)
    for _ in range(3):
        with kept.step(), torch.no_grad():
            model(torch.randn(8, 16))
    assert told() == []


def test_a_layer_that_takes_its_pages_itself_is_not_mentioned(told):
    model = nn.Sequential(MoE(MoEConfig(width=16, expert_width=16, experts=4, top_k=2)))
    train(model, ps.Rule("0.experts", "stash"), forward=lambda x: model(x)[0])
    assert told() == []


def test_nothing_is_watched_after_the_second_step():
    kept = train(net(), ps.Rule("*", "stash", min_bytes=0), steps=1)
    assert kept._saved.look is not None
    kept = train(net(), ps.Rule("*", "stash", min_bytes=0), steps=2)
    assert kept._saved.look is None


def test_a_step_that_is_never_opened(told):
    model = net()
    ps.Keeper(ps.Policy([ps.Rule("*", "stash", min_bytes=0)]), backend="torch").attach(model)
    for count in range(5):
        assert bool(told()) == (count >= 3)
        model(torch.randn(8, 16)).sum().backward()
    (line,) = told()
    assert "3 backward passes ran outside of its `with keeper.step():`" in line


def test_evaluation_outside_of_steps_is_nothing_to_warn_of(told):
    model = net()
    kept = ps.Keeper(ps.Policy([ps.Rule("*", "stash", min_bytes=0)]), backend="torch").attach(model)
    for _ in range(5):
        model(torch.randn(8, 16))
        with torch.no_grad():
            model(torch.randn(8, 16))
    with kept.step():
        model(torch.randn(8, 16)).sum().backward()
    for _ in range(5):
        model(torch.randn(8, 16)).sum().backward()
    assert told() == []


@pytest.mark.parametrize(
    ("expected", "fields", "why"),
    [
        (16, {"prefetch_bytes": 0}, None),
        (0, {"prefetch_bytes": 0}, "it saves no expected rows of min_bytes or more"),
        (16, {"prefetch_bytes": "1GiB"}, "all that it saves is within the window"),
    ],
)
def test_a_fraction_of_expected_rows_that_offloads_nothing(told, lone_rank, expected, fields, why):
    config = MoEConfig(width=16, expert_width=16, experts=2, top_k=1, expected_rows=expected)
    model = nn.Sequential(*(MoE(config, dispatch=AllGather(config, max_tokens=32)) for _ in range(3)))

    def forward(x):
        for layer in model:
            x = x + layer(x)[0]
        return x

    rule = ps.Rule("*.experts", "stash", min_bytes=16, fraction=1.0, **fields)
    train(model, rule, forward=forward)
    start = "rule '*.experts': its fraction offloaded nothing in 2 steps: "
    assert [line.startswith(start + why) for line in told()] == [True] if why else told() == []


def test_a_rule_whose_tensors_move_under_another_is_not_mentioned(told):
    """`exp` saves its result, and the product after it saves that as its input: the first rule has moved it."""
    layers = nn.Sequential(*(nn.Sequential(Shifted(), nn.Linear(16, 16)) for _ in range(4)))
    both = [ps.Rule(f"*.{part}", "offload", min_bytes=0, prefetch_bytes=0) for part in (0, 1)]
    train(layers, *both)
    assert told() == []


def test_a_step_that_is_larger_than_those_before_is_nothing_to_warn_of(told):
    """There is host memory for the first step's size in the second, and for all of it from the third on."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), Shifted()) for _ in range(4)))
    rules = [ps.Rule(f"{number}.1", "offload", min_bytes=0, prefetch_bytes=1) for number in range(3)]
    keeper = ps.Keeper(ps.Policy(rules), backend="torch").attach(layers)
    refused = []
    for rows in (8, 640, 640, 640):
        with keeper.step():
            layers(torch.randn(rows, 16)).sum().backward()
        found = keeper.stats().offload
        refused.append(0 if found is None else found.refused_peak)
    assert refused[1] > 0
    assert refused[3] == 0
    assert told() == []
