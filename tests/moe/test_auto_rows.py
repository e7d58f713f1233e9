"""`expected_rows="auto"`: a keeper chooses the number from what arrived, and no bit depends on who chose it."""

import logging

import pytest
import torch
from support import same
from support.steps import training_step
from torch import nn

import pagestash as ps
from pagestash.kernels.moe.route import route
from pagestash.moe import MoE, MoEConfig, Received
from pagestash.saved import expected_rows as expected
from pagestash.saved import received_rows

WIDTH, INNER, EXPERTS, TOP_K, TOKENS, DEPTH = 32, 24, 4, 2, 48, 3
AVERAGE = TOKENS * TOP_K
ROW = (WIDTH + 2 * INNER) * 4


class Loopback:
    """A dispatch that brings as many of this rank's choices as it is told, with room for twice an even load."""

    experts, capacity = EXPERTS, 2 * AVERAGE

    def __init__(self, expected):
        self.expected = expected

    def send(self, x, ids, weights, over):
        arriving = torch.arange(ids.numel()).view_as(ids) < self.rows
        routing = route(ids.masked_fill(~arriving, -1), EXPERTS, capacity=self.capacity, over=over)
        return Received(x, weights, ids, routing, self.expected)

    def collect(self, slots, received):
        return slots

    def grow_capacity(self, *, headroom, alignment):
        return False


class Stack(nn.Module):
    def __init__(self, expected) -> None:
        super().__init__()
        config = MoEConfig(
            width=WIDTH, expert_width=INNER, experts=EXPERTS, top_k=TOP_K, expected_rows=expected
        )
        self.wires = [Loopback(expected) for _ in range(DEPTH)]
        self.layers = nn.ModuleList(MoE(config, dispatch=wire) for wire in self.wires)

    def forward(self, x, rows):
        for layer, wire, count in zip(self.layers, self.wires, rows.tolist()):
            wire.rows = count
            y, _ = layer(x)
            x = x + y
        return x.square().mean()


def policy(fraction=None, **pool) -> ps.Policy:
    leaves = {} if fraction is None else {"fraction": fraction, "prefetch_bytes": 0}
    rule = ps.Rule("layers.*.experts", "stash", min_bytes=256, **leaves)
    return ps.Policy([rule], ps.PoolConfig(page=1024, **pool))


def made(expected, fraction=None, **pool):
    torch.manual_seed(0)
    model = Stack(expected)
    return model, ps.Keeper(policy(fraction, **pool), backend="torch").attach(model)


def drawn(steps, low=0.6, high=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    share = low + (high - low) * torch.rand(steps, DEPTH, generator=generator)
    return list((share * AVERAGE).to(torch.int64))


def run(model, keeper, rows):
    torch.manual_seed(1)
    x = torch.randn(TOKENS, WIDTH)
    model.zero_grad()
    with keeper.step():
        loss = model(x, rows)
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def number(keeper):
    return keeper.stats().expected_rows.rows


def test_a_step_is_that_of_the_same_fixed_number_bit_for_bit():
    model, keeper = made("auto")
    for rows in drawn(12):
        before = model.layers[0].experts.received_rows.expected
        fixed, fixed_keeper = made(before)
        assert same(run(model, keeper, rows), run(fixed, fixed_keeper, rows))
    assert number(keeper) > 0


@pytest.mark.parametrize("fixed", [0, 20, 2 * AVERAGE])
def test_results_are_those_of_any_fixed_number_to_the_rounding_of_sums(fixed):
    """The gradient of the first projection is a sum of two parts: its last bits depend on where rows are cut."""
    model, keeper = made("auto")
    other, other_keeper = made(fixed)
    for rows in drawn(4):
        for one, two in zip(run(model, keeper, rows), run(other, other_keeper, rows), strict=True):
            torch.testing.assert_close(one, two)


def test_the_first_step_decides_and_the_pool_is_for_the_rows_beyond():
    model, keeper = made("auto")
    run(model, keeper, torch.tensor([60, 70, 96]))
    stats = keeper.stats()
    chosen = stats.expected_rows
    assert 50 <= chosen.rows <= 96
    assert chosen.head_bytes == DEPTH * chosen.rows * ROW
    assert chosen.pool_bytes <= keeper.pool.device_pages * 1024
    # Measured without expected rows it would be for all of them.
    assert keeper.pool.device_pages * 1024 < 0.5 * (60 + 70 + 96) * ROW
    run(model, keeper, torch.tensor([60, 70, 96]))
    assert keeper.stats().no_page.groups == 0


def test_a_forward_without_backward_is_not_counted():
    model, keeper = made("auto")
    run(model, keeper, torch.tensor([60, 70, 96]))
    with torch.no_grad():
        model(torch.randn(TOKENS, WIDTH), torch.tensor([1, 1, 1]))
    assert [layer.experts.received_rows.log[:3].tolist() for layer in model.layers] == [
        [1, 60, 0],
        [1, 70, 0],
        [1, 96, 0],
    ]


def test_rows_that_drift_get_another_number_once_and_it_is_said(caplog, monkeypatch):
    monkeypatch.setattr(received_rows, "EVERY", 16)
    monkeypatch.setattr(expected, "WINDOW", 16)
    model, keeper = made("auto")
    few, many = drawn(1 + 10, 0.2, 0.3), drawn(40, 0.9, 1.0)  # the last decision sees only these
    with caplog.at_level(logging.INFO, "pagestash"):
        for rows in few:
            run(model, keeper, rows)
        first = number(keeper)
        for rows in many:
            run(model, keeper, rows)
    assert first < 0.35 * AVERAGE < 0.8 * AVERAGE < number(keeper)
    stats = keeper.stats()
    said = [record.getMessage() for record in caplog.records if "expected_rows becomes" in record.message]
    assert len(said) == stats.expected_rows.changes >= 1
    assert f"expected_rows becomes {number(keeper)} instead of" in said[-1]
    changes = stats.expected_rows.changes
    looked = []
    monkeypatch.setattr(
        expected.AutoRows, "decide", lambda self, own=expected.AutoRows.decide: looked.append(own(self))
    )
    for rows in drawn(20, 0.9, 1.0, seed=3):
        run(model, keeper, rows)
    assert looked == [False]
    assert keeper.stats().expected_rows.changes == changes


@pytest.mark.slow
def test_a_changed_number_is_within_a_step_of_a_fixed_one_bit_for_bit():
    model, keeper = made("auto")
    seen = set()
    for rows in drawn(10, 0.2, 0.3) + drawn(30, 0.9, 1.0):
        before = model.layers[0].experts.received_rows.expected
        seen.add(before)
        fixed, fixed_keeper = made(before)
        assert same(run(model, keeper, rows), run(fixed, fixed_keeper, rows))
    assert len(seen) > 2  # 0, the first number, another one


def test_a_replay_expects_the_number_of_its_forward():
    def gradients(other):
        torch.manual_seed(0)
        model = Stack("auto")
        keeper = ps.Keeper(ps.Policy([ps.Rule("layers.*", "recompute")]), backend="torch").attach(model)
        with keeper.step():
            loss = model(torch.randn(TOKENS, WIDTH), torch.tensor([40, 50, 60]))
            for layer in model.layers:
                layer.experts.received_rows.expected = other
            loss.backward()
        return [p.grad for p in model.parameters()]

    assert same(gradients(0), gradients(30))


def test_a_pool_of_a_given_size_stays_and_the_number_is_the_least_that_suffices():
    pages = 40
    model, keeper = made("auto", device=pages * 1024)
    rows = torch.tensor([60, 70, 90])
    for _ in range(3):
        run(model, keeper, rows)
    least = number(keeper)
    assert keeper.pool.device_pages == pages
    assert 0 < least < 90
    generous, other = made("auto", device=400 * 1024)
    for _ in range(3):
        run(generous, other, rows)
    assert number(other) == 0


def test_without_a_stash_rule_all_rows_are_in_one_buffer():
    torch.manual_seed(0)
    model = Stack("auto")
    keeper = ps.Keeper(ps.Policy([ps.Rule("layers.*.experts", "keep")])).attach(model)
    for rows in drawn(3):
        run(model, keeper, rows)
    assert keeper.stats().expected_rows is None
    assert model.layers[0].experts.received_rows.expected == 0


def test_a_detached_keeper_leaves_no_number_behind():
    model, keeper = made("auto")
    run(model, keeper, torch.tensor([60, 70, 96]))
    assert model.layers[0].experts.received_rows.expected > 0
    keeper.detach()
    assert [layer.experts.received_rows.expected for layer in model.layers] == [0] * DEPTH
    again = ps.Keeper(policy(), backend="torch").attach(model)
    run(model, again, torch.tensor([60, 70, 96]))
    assert number(again) > 0


def test_a_copy_of_a_layer_counts_rows_of_its_own():
    import copy

    model, keeper = made("auto")
    run(model, keeper, torch.tensor([60, 70, 96]))
    keeper.detach()
    twin = copy.deepcopy(model)
    assert twin.layers[0].experts.received_rows.log is None
    assert model.layers[0].experts.received_rows.log[0] == 1


@pytest.mark.parametrize("pool", [{}, {"device": 80 * 1024}])
def test_expected_rows_that_leave_are_measured_in_the_second_step(pool):
    model, keeper = made("auto", fraction=1.0, **pool)
    for step, rows in enumerate(drawn(5)):
        before = model.layers[0].experts.received_rows.expected
        assert (before > 0) == (step > 0)
        fixed, fixed_keeper = made(before)
        keeper.reset_peaks()
        assert same(run(model, keeper, rows), run(fixed, fixed_keeper, rows))
        assert keeper.pool is not None
    stats = keeper.stats()
    chosen = stats.expected_rows
    # All but the last layer's, whose backward comes at once.
    assert stats.homes["offload"].peak >= (DEPTH - 1) * chosen.rows * ROW
    assert chosen.head_bytes == 0
    assert stats.no_page.groups == 0


@pytest.mark.slow
def test_expected_rows_that_leave_follow_a_change():
    steps = drawn(4, 0.2, 0.3) + drawn(20, 0.9, 1.0)
    losses, model, keeper, _ = graphed("auto", steps, fraction=1.0)
    plain, other, _, _ = graphed(0, steps)
    torch.testing.assert_close(torch.stack(losses), torch.stack(plain))
    for one, two in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(one, two)
    stats = keeper.stats()
    assert stats.expected_rows.changes >= 1
    assert stats.homes["offload"].peak >= (DEPTH - 1) * number(keeper) * ROW


def graphed(expected, steps, **pool):
    model, keeper = made(expected, **pool)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = ps.GraphedStep(training_step(model, optimizer), keeper, optimizer=optimizer)
    torch.manual_seed(2)
    losses = [step(torch.randn(TOKENS, WIDTH), rows) for rows in steps]
    step.wait()
    return losses, model, keeper, step


@pytest.mark.slow
def test_a_stepper_reruns_overflows_and_changes_the_number_between_steps():
    steps = drawn(4, 0.2, 0.3) + drawn(20, 0.9, 1.0)
    losses, model, keeper, step = graphed("auto", steps)
    plain, other, _, _ = graphed(0, steps)
    assert step.reruns > 0
    assert keeper.stats().expected_rows.changes >= 1
    assert not keeper.stats().overflow
    torch.testing.assert_close(torch.stack(losses), torch.stack(plain))
    for one, two in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(one, two)


def test_microbatches_that_wait_at_one_time_are_counted_together():
    model, keeper = made("auto")
    x, rows = torch.randn(TOKENS, WIDTH), torch.tensor([60, 70, 96])

    def one_by_one():
        for _ in range(2):
            model(x, rows).backward()

    def together():
        losses = [model(x, rows) for _ in range(2)]
        for loss in losses:
            loss.backward()

    heads = []
    for run_step in (one_by_one, together):
        model, keeper = made("auto")
        with keeper.step():
            run_step()
        found = keeper.stats().expected_rows
        heads.append(found.head_bytes // (found.rows * ROW))
    assert heads == [DEPTH, 2 * DEPTH]


def test_reads_and_decisions_come_after_the_same_steps_everywhere():
    reads = [n for n in range(1, 600) if received_rows.reads_after(n)]
    assert reads == [8, 16, 32, 64, 128, 256, 384, 512]
    assert [n for n in range(1, 600) if received_rows.decides_after(n)] == [n + 2 for n in reads]


@pytest.mark.parametrize("wrong", ["Auto", "", -1])
def test_other_words_and_negative_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="expected 0 or more, or 'auto'"):
        MoEConfig(width=8, expert_width=8, experts=2, top_k=1, expected_rows=wrong)
