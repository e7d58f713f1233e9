"""MoE layers under `bits=8`: rows and projections wait in half the bytes; what is routed where stays exact."""

from dataclasses import replace

import pytest
import torch
from support import same
from support.tiers import KERNELS_IN_THE_REST, slow
from torch import nn

import pagestash as ps
from pagestash.kernels.moe import gated
from pagestash.kernels.moe.activation import Activation
from pagestash.kernels.moe.route import route
from pagestash.moe import MoE, MoEConfig, Received
from pagestash.moe.projection import Projection
from pagestash.moe.saving import BlockOptions
from pagestash.saved.received_rows import RowsRecording
from pagestash.torch_internals import StorageWeakRef

WIDTH, INNER, EXPERTS, TOP_K, TOKENS, DEPTH = 128, 64, 4, 2, 64, 2
CHOICES = TOKENS * TOP_K
BY_RULES, BEGIN = BlockOptions.by_rules, RowsRecording.begin
ACTIVATION, FORWARD = gated.forward, Projection.forward
ROW = 2 * (128 + 16)  # coded: 128 values of the row and 128 of its projection, each with a scale in 16 bytes


class Loopback:
    """A dispatch whose wire ends where it starts, with room for twice the rows."""

    experts = EXPERTS

    def __init__(self, expected):
        self.expected = expected

    def send(self, x, ids, weights, over):
        routing = route(ids, EXPERTS, capacity=2 * CHOICES, over=over)
        return Received(x, weights, ids, routing, self.expected)

    def collect(self, slots, received):
        return slots

    def grow_capacity(self, **_):
        return False


class Stack(nn.Module):
    def __init__(self, expected: int | None, inner: int = INNER, depth: int = DEPTH, **config) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = MoEConfig(width=WIDTH, expert_width=inner, experts=EXPERTS, top_k=TOP_K, **config)
        dispatches = [None if expected is None else Loopback(expected) for _ in range(depth)]
        self.layers = nn.ModuleList(MoE(config, dispatch=dispatch) for dispatch in dispatches)
        self.to(torch.bfloat16)

    def forward(self, x):
        for layer in self.layers:
            y, aux = layer(x)
            x = x + y
        return x.float().square().mean() + aux


def run(model, x, keeper=None):
    model.zero_grad()
    if keeper is None:
        model(x).backward()
    else:
        with keeper.step():
            model(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def policy(bits=8, page=1024, home="stash", parts=("experts",), fields=(), **pool):
    rules = [ps.Rule(f"layers.*.{part}", home, min_bytes=2048, bits=bits, **dict(fields)) for part in parts]
    return ps.Policy(rules, ps.PoolConfig(page=page, headroom=1.5, **pool))


def steps(expected, *, inner=INNER, tokens=TOKENS, config=(), **given):
    """The gradients of three steps, all alike, and the keeper's figures."""
    model = Stack(expected, inner, **dict(config))
    keeper = ps.Keeper(policy(**given), backend="torch").attach(model)
    found = [run(model, batch()[:tokens], keeper) for _ in range(3)]
    assert all(same(each, found[0]) for each in found)
    stats = keeper.stats()
    assert stats.homes["stash"].bytes == 0
    keeper.detach()
    return found[0], stats


def batch():
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.fixture
def coded_at_the_end(monkeypatch):
    """What autograd saves is coded when the region ends, as everywhere else: the reference."""

    def without(*given, **more):
        return replace(BY_RULES(*given, **more), coded=False)

    return lambda: monkeypatch.setattr(BlockOptions, "by_rules", without)


@pytest.mark.parametrize("expected", [None, *slow(0, 60, 2 * CHOICES)])
@KERNELS_IN_THE_REST
def test_gradients_are_near_the_exact_ones_and_the_same_in_every_step(backend, expected):
    # Interpreted kernels are slow: two layers once.
    model = Stack(expected, depth=DEPTH if backend == "torch" or expected == 60 else 1)
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    plain = run(model, x)
    keeper = ps.Keeper(policy(), backend=backend).attach(model)
    measured = run(model, x, keeper)
    for _ in range(2):
        assert same(run(model, x, keeper), measured)
    for found, exact in zip(measured, plain):
        assert (found - exact).norm() <= 0.1 * exact.norm() + 1e-6
    assert not same(measured, plain)
    keeper.detach()


@pytest.mark.parametrize("expected", [0, 60, 2 * CHOICES])
def test_excess_rows_are_coded_in_pages_and_expected_ones_where_they_are_kept(expected):
    model, x = Stack(expected), torch.randn(TOKENS, WIDTH).bfloat16()
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    run(model, x, keeper)
    keeper.reset_peaks()
    run(model, x, keeper)
    stats = keeper.stats()
    beyond = max(CHOICES - expected, 0)
    assert stats.homes["stash"].peak == DEPTH * beyond * ROW
    kept = stats.regions["layers.1.experts"].peak - beyond * ROW
    assert expected * ROW <= kept < expected * ROW + 8192  # and indices
    keeper.detach()


def test_a_pool_without_pages_keeps_the_codes():
    model, x = Stack(0), torch.randn(TOKENS, WIDTH).bfloat16()
    enough = ps.Keeper(policy(), backend="torch").attach(model)
    run(model, x, enough)
    expected = run(model, x, enough)
    enough.detach()
    short = ps.Keeper(policy(device=4096), backend="torch").attach(model)
    assert same(run(model, x, short), expected)
    assert short.stats().no_page.groups > 0
    assert same(run(model, x, short), expected)
    short.detach()


@pytest.mark.parametrize("expected", [None, 0])
@pytest.mark.parametrize("home", ["stash", "keep", "offload"])
def test_gradients_are_those_of_rows_and_projections_that_are_coded_and_decoded(
    coded_at_the_end, home, expected
):
    found, _ = steps(expected, inner=72, home=home)
    coded_at_the_end()
    assert same(found, steps(expected, inner=72, home=home)[0])


@pytest.mark.parametrize("expected", [None, 0, 60, 2 * CHOICES])
@pytest.mark.parametrize("parts", [("experts",), ("expert_fc1", "moe_act")])
def test_bits_do_not_depend_on_the_home(parts, expected):
    wanted, _ = steps(expected)
    for home in ("stash", "keep", "offload"):
        assert same(steps(expected, home=home, parts=parts)[0], wanted)


@pytest.mark.parametrize("expected", [None, 60])
def test_what_is_coded_is_let_go_before_the_second_projection(monkeypatch, expected):
    seen = []

    def activation(h_RH, *given, **more):
        assert not any(ref.expired() for ref in seen)
        seen.append(StorageWeakRef(h_RH.untyped_storage()))
        return ACTIVATION(h_RH, *given, **more)

    def forward(projection, *given):
        if projection.weight_EOI.shape[1] == WIDTH:
            assert seen.pop().expired()
            assert not seen
        return FORWARD(projection, *given)

    monkeypatch.setattr(gated, "forward", activation)
    monkeypatch.setattr(Projection, "forward", forward)
    steps(expected, inner=72)


@pytest.mark.parametrize("home", ["stash", "keep", "offload"])
def test_rows_past_the_valid_ones_are_not_coded_and_do_not_touch_others(monkeypatch, home):
    """A block that went on from the last valid row, of 144 values, would have its scale from the row behind it."""
    given = {"inner": 72, "tokens": 63, "home": home}
    wanted = [steps(expected, **given)[0] for expected in (0, CHOICES + 20)]

    def activation(h_RH, info, *given, **more):
        h_RH[int(info.rows) :] = 1e30
        return ACTIVATION(h_RH, info, *given, **more)

    monkeypatch.setattr(gated, "forward", activation)
    found = [steps(expected, **given)[0] for expected in (0, CHOICES + 20)]
    assert same(found[0], wanted[0])
    assert same(found[1], wanted[1])


@pytest.mark.parametrize("expected", [100, CHOICES + 20])
@pytest.mark.parametrize(("fraction", "left"), [(0.5, 0.5), (1.0, 0.75)])
def test_codes_of_expected_rows_leave_for_the_host(fraction, left, expected):
    """Of all, what backward asks for first stays: the last projection, a quarter."""
    wanted, _ = steps(expected)
    fields = {"fraction": fraction, "prefetch_bytes": 0}
    found, stats = steps(expected, fields=fields)
    assert same(found, wanted)
    assert stats.homes["offload"].peak == left * DEPTH * expected * ROW
    assert stats.homes["stash"].peak == DEPTH * max(CHOICES - expected, 0) * ROW


@pytest.mark.parametrize("expected", [0, 60])
def test_rows_of_a_layer_without_gate_or_with_biases_are_coded(expected):
    for config in (
        {"activation": "clamped", "bias": True},
        {"activation": Activation(curve="relu2", gated=False)},
    ):
        plain = run(Stack(expected, 72, **config), batch())
        found, _ = steps(expected, inner=72, config=config)
        for one, exact in zip(found, plain):
            assert (one - exact).norm() <= 0.1 * exact.norm() + 1e-6


def test_one_rule_with_bits_of_two_codes_what_it_names():
    """The rows wait as they are, the first projection in codes."""
    model = Stack(60)
    rules = [
        ps.Rule("layers.*.expert_fc1", "stash", min_bytes=2048),
        ps.Rule("layers.*.moe_act", "stash", min_bytes=2048, bits=8),
    ]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=1024, headroom=1.5)), backend="torch").attach(
        model
    )
    plain = run(model, batch())
    found = [run(model, batch(), keeper) for _ in range(3)]
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    for one, exact in zip(found[0], plain):
        assert (one - exact).norm() <= 0.1 * exact.norm() + 1e-6
    assert not same(found[0], plain)
    keeper.detach()


def test_a_recomputed_layer_saves_what_its_replay_does():
    model = Stack(60)
    rules = [ps.Rule("layers.*", "recompute"), *policy().rules]
    plain = run(model, batch())
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=1024, headroom=1.5)), backend="torch").attach(
        model
    )
    found = [run(model, batch(), keeper) for _ in range(3)]
    assert same(found[0], found[1])
    for one, exact in zip(found[0], plain):
        assert (one - exact).norm() <= 0.1 * exact.norm() + 1e-6
    keeper.detach()


@pytest.mark.parametrize("expected", [None, 60])
def test_a_recomputed_layer_with_a_coded_part_saves_what_its_replay_does(expected):
    model = Stack(expected)
    rules = [ps.Rule("layers.*", "recompute"), *policy(parts=("moe_act",)).rules]
    plain = run(model, batch())
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=1024, headroom=1.5)), backend="torch").attach(
        model
    )
    found = [run(model, batch(), keeper) for _ in range(3)]
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    for one, exact in zip(found[0], plain):
        assert (one - exact).norm() <= 0.1 * exact.norm() + 1e-6
    keeper.detach()


@pytest.mark.parametrize("pages", [8, 1000])
def test_a_projection_beside_coded_rows_has_the_same_bits_whatever_the_pool_grants(pages):
    """What were recomputed from codes would not be what forward computed."""
    rules = [
        ps.Rule("layers.*.expert_fc1", "keep", min_bytes=2048, bits=8),
        ps.Rule("layers.*.moe_act", "stash", min_bytes=2048),
    ]
    model = Stack(60)
    made = ps.Policy(rules, ps.PoolConfig(page=1024, device=pages * 1024))
    keeper = ps.Keeper(made, backend="torch").attach(model)
    found = [run(model, batch(), keeper) for _ in range(3)]
    keeper.detach()
    ample = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=1024)), backend="torch").attach(model)
    wanted = run(model, batch(), ample)
    ample.detach()
    assert all(same(each, wanted) for each in found)


@pytest.mark.parametrize("expected", [None, 0, 60])
@pytest.mark.parametrize("least", [0, 2048])
def test_a_step_without_tokens_leaves_gradients_of_zeros(expected, least):
    model = Stack(expected)
    rule = ps.Rule("layers.*.experts", "stash", min_bytes=least, bits=8)
    keeper = ps.Keeper(ps.Policy([rule], ps.PoolConfig(page=1024)), backend="torch").attach(model)
    run(model, batch(), keeper)
    model.zero_grad()
    with keeper.step():
        x = batch()[:0]
        for layer in model.layers:
            x = x + layer(x)[0]
        x.float().sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert keeper.stats().homes["stash"].bytes == 0
    keeper.detach()


@pytest.mark.parametrize("frozen", [False, True])
def test_rows_that_a_frozen_projection_does_not_save_are_not_counted(frozen, monkeypatch):
    counted = []

    def begin(recording, layer, row_bytes, *more):
        counted.append(row_bytes)
        return BEGIN(recording, layer, row_bytes, *more)

    monkeypatch.setattr(RowsRecording, "begin", begin)
    model = Stack("auto", expected_rows="auto")
    for layer in model.layers:
        layer.expert_fc1.requires_grad_(not frozen)
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    with keeper.step():
        model(batch()).backward()
    assert counted == DEPTH * [(ROW // 2,) if frozen else (ROW // 2, ROW // 2)]
    keeper.detach()


@pytest.mark.parametrize("expected", [None, 60])
def test_a_graph_that_is_kept_gives_the_same_gradients_again(expected):
    model = Stack(expected)
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    run(model, batch(), keeper)
    model.zero_grad()
    with keeper.step():
        loss = model(batch())
        loss.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        loss.backward()
    assert same([parameter.grad for parameter in model.parameters()], once)
    keeper.detach()


def test_a_step_whose_codes_find_no_pages_is_run_again():
    def trained(device):
        model = Stack(20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        keeper = ps.Keeper(policy(device=device), backend="torch").attach(model)

        def train_step(x):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
        losses = [step(batch()) for _ in range(3)]
        step.wait()
        found = [*losses, *(parameter.detach().clone() for parameter in model.parameters())]
        return found, step.reruns

    (wanted, no_reruns), (found, reruns) = trained("1MiB"), trained(8192)
    assert no_reruns == 0
    assert reruns > 0
    assert same(found, wanted)
