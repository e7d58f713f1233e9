"""Offload: the same bits, and memory that really goes."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from offloaded import MLP, RULE, TwoParts, keeper_for, losses_and_grads, moving, nothing_left
from stack import CAPACITY, INNER, WIDTH, Stack, batch, run
from support import same
from support.tiers import KERNELS_IN_THE_REST
from torch import nn

import pagestash as ps
from pagestash.saved.offload import transfers
from pagestash.saved.offload.transfers import Transfers
from pagestash.torch_internals import StorageWeakRef


@pytest.mark.parametrize("prefetch", [0, 100_000, None, 10**9])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_losses_and_gradients_are_the_same_to_the_last_bit(fraction, prefetch):
    model, x = MLP(), [torch.randn(32, 64)]
    plain = losses_and_grads(model, x)
    rule = ps.Rule("layers.*", "offload", fraction=fraction, prefetch_bytes=prefetch, **RULE)
    keeper = keeper_for(model, rule)
    for _ in range(4):
        assert same(losses_and_grads(model, x, keeper), plain)
        if keeper._offload.plan is not None:
            nothing_left(keeper)


@pytest.mark.parametrize(
    ("fraction", "rows"),
    [
        (0.3, 0),
        (0.3, 20),
        (1.0, 20),
        *(
            pytest.param(fraction, rows, marks=pytest.mark.slow)
            for fraction, rows in ((0.3, 1), (0.3, CAPACITY), (1.0, 0), (1.0, 1), (1.0, CAPACITY))
        ),
    ],
)
@KERNELS_IN_THE_REST
def test_valid_rows_are_split_at_a_fixed_row(backend, fraction, rows):
    model = Stack(depth=3)
    rule = ps.Rule("layers.*.experts", "offload", fraction=fraction, prefetch_bytes=0, **RULE)
    # Rows of 384 bytes cross the borders of pages; more pages would only take the interpreter longer.
    policy = ps.Policy([rule], ps.PoolConfig(page=1024, headroom=6.0))
    keeper = ps.Keeper(policy, backend=backend).attach(model)
    x, count = batch(24)
    assert same(run(model, x, count, keeper), run(model, x, count))
    # Then another number of rows than was expected, fewer and more.
    x, count = batch(rows)
    plain = run(model, x, count)
    for _ in range(2):
        assert same(run(model, x, count, keeper), plain)
    nothing_left(keeper)


def test_the_leading_rows_go_to_the_host_and_the_others_to_pages():
    model = Stack(depth=3)
    rule = ps.Rule("layers.*.experts", "offload", fraction=0.5, prefetch_bytes=0, **RULE)
    keeper = keeper_for(model, rule)
    x, count = batch(24)
    run(model, x, count, keeper)
    with keeper.step():
        loss = model(x, count)
        stats = keeper.stats()
        loss.backward()
    # The experts save their input, both halves of the projection in one entry, silu's output and the product.
    row = 4 * (WIDTH + 2 * INNER + INNER + INNER)
    assert stats.homes["offload"].bytes == 2 * 12 * row
    assert stats.homes["stash"].bytes == 2 * 12 * row + 24 * row  # the last layer stays
    nothing_left(keeper)


def test_rows_that_did_not_travel_come_back_as_zero():
    """Garbage rows between the valid ones and the split are no news to code that reads whole buffers."""
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rows):
            ctx.save_for_backward(ps.rows(x, rows))
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.saved_tensors[0].clone())
            return grad, None

    class Buffer(nn.Module):
        def forward(self, x, rows):
            filled = torch.full((CAPACITY, WIDTH), torch.nan)
            filled = torch.cat([x[: int(rows)], filled[int(rows) :]]) * 1.0
            return Watch.apply(filled, rows)[: int(rows)].sum()

    model = nn.ModuleDict({"a": Buffer(), "b": Buffer()})
    rule = ps.Rule("*", "offload", prefetch_bytes=0, **RULE)
    keeper = keeper_for(model, rule, device=1 << 20)
    x = torch.randn(CAPACITY, WIDTH, requires_grad=True)
    for rows in (40, 10, 60):
        count = torch.tensor([rows])
        seen.clear()
        with keeper.step():
            (model["a"](x, count) + model["b"](x, count)).backward()
        for value in seen:
            assert torch.equal(value[:rows], x[:rows])
            assert not value[rows:].any()


def test_the_last_groups_stay_and_the_rest_leaves():
    model, x = MLP(depth=4), torch.randn(32, 64)
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", prefetch_bytes=0, **RULE))
    losses_and_grads(model, [x], keeper)
    with keeper.step():
        loss = model(x)
        stats = keeper.stats()
        loss.backward()
    layer = 32 * (64 + 128 + 128) * 4  # the input, and what GELU and the second projection take
    assert stats.homes["offload"].bytes == 3 * layer
    assert stats.regions["layers.3"].bytes == layer
    assert stats.offload.host_bytes == 3 * layer


def test_a_moved_tensor_is_gone_from_the_device():
    model = MLP(depth=3)
    alive = []

    def note(module, args, output):
        alive.append(weakref.ref(output.untyped_storage()))

    for layer in model.layers:
        layer[0].register_forward_hook(note)
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", prefetch_bytes=0, **RULE))
    x = torch.randn(32, 64)
    losses_and_grads(model, [x], keeper)
    alive.clear()
    with keeper.step():
        loss = model(x)
        assert [reference() is not None for reference in alive] == [False, False, True]
        loss.backward()


def test_a_fraction_is_of_bytes():
    for fraction in (0.25, 0.5, 0.75):
        model, x = MLP(depth=8), torch.randn(32, 64)
        rule = ps.Rule("layers.*", "offload", fraction=fraction, prefetch_bytes=0, **RULE)
        keeper = keeper_for(model, rule)
        losses_and_grads(model, [x], keeper)
        with keeper.step():
            loss = model(x)
            moved = keeper.stats().homes["offload"].bytes
            loss.backward()
        total, largest = 8 * 32 * (64 + 128 + 128) * 4, 32 * 128 * 4
        last = 32 * (64 + 128 + 128) * 4  # of which the last group may have been one
        assert fraction * total - largest - last <= moved <= fraction * total + largest


@pytest.mark.parametrize("rules", ["layers.*", "layers.{}"])
@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.7])
def test_the_same_tensors_of_each_microbatch_leave(rules, fraction):
    model, x = MLP(depth=3), torch.randn(32, 64)
    names = dict.fromkeys(rules.format(number) for number in range(3))
    keeper = keeper_for(
        model, *[ps.Rule(name, "offload", fraction=fraction, prefetch_bytes=0, **RULE) for name in names]
    )
    for step in range(3):
        moved = []
        with keeper.step():
            for _ in range(4):
                loss = model(x)
                moved.append(keeper.stats().homes["offload"].bytes)
                loss.backward()
        assert moved[0] > 0
        assert len(set(moved)) == 1 or step == 0  # the first step is measured
    nothing_left(keeper)


def test_small_tensors_stay():
    model, x = MLP(depth=3), torch.randn(32, 64)
    keeper = keeper_for(model, ps.Rule("layers.*", "offload"))
    assert keeper.policy.rules[0].min_bytes == 1 << 20
    losses_and_grads(model, [x], keeper)
    assert keeper.stats().homes["offload"].peak == 0


def test_a_full_host_keeps_tensors_on_the_device_and_says_so(caplog):
    model, x = MLP(depth=4), [torch.randn(32, 64)]
    plain = losses_and_grads(model, x)
    layer = 32 * (64 + 128 + 128) * 4
    rule = ps.Rule("layers.*", "offload", prefetch_bytes=0, **RULE)
    keeper = keeper_for(model, rule, host=layer + layer // 2)
    for _ in range(3):
        assert same(losses_and_grads(model, x, keeper), plain)
    stats = keeper.stats()
    assert stats.offload.limit == layer + layer // 2
    assert stats.offload.host_bytes <= stats.offload.limit
    assert 0 < stats.homes["offload"].peak <= stats.offload.limit
    assert stats.offload.refused == 0
    assert stats.offload.refused_peak + stats.homes["offload"].peak == 3 * layer
    assert "raise [pool] host" in caplog.text
    nothing_left(keeper)


def test_host_memory_that_larger_batches_replace_is_freed():
    model = MLP()
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", **RULE))
    for _ in range(3):
        losses_and_grads(model, [torch.randn(8, 64)], keeper)
    small = [StorageWeakRef(slab.untyped_storage()) for slab in moving(keeper).slabs._slabs]
    size = moving(keeper).slabs.size
    assert small
    for _ in range(3):
        losses_and_grads(model, [torch.randn(32, 64)], keeper)
    assert moving(keeper).slabs.size > size
    assert all(slab.expired() for slab in small)
    nothing_left(keeper)


def test_no_host_memory_at_all_keeps_everything():
    model, x = MLP(), [torch.randn(32, 64)]
    plain = losses_and_grads(model, x)
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", **RULE), host=0)
    for _ in range(3):
        assert same(losses_and_grads(model, x, keeper), plain)
    assert keeper.stats().homes["offload"].peak in (
        0,
        4 * 32 * 320 * 4,
    )  # the measured step, which is no limit's


def test_backward_twice_and_a_graph_that_is_never_used():
    model, x = MLP(), torch.randn(32, 64)
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", prefetch_bytes=0, **RULE))
    losses_and_grads(model, [x], keeper)
    weight = model.layers[0][0].weight
    with keeper.step():
        loss = model(x)
        first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
        second = torch.autograd.grad(loss, weight)[0]
        model(x)
    assert torch.equal(first, second)
    del loss
    nothing_left(keeper)


def test_an_exception_in_forward_leaves_nothing():
    model, x = MLP(), torch.randn(32, 64)
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", prefetch_bytes=0, **RULE))
    plain = losses_and_grads(model, [x])
    losses_and_grads(model, [x], keeper)

    def fail(module, args):
        raise KeyError("no")

    hook = model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyError), keeper.step():
        model(x)
    hook.remove()
    nothing_left(keeper)
    assert same(losses_and_grads(model, [x], keeper), plain)


def test_a_tensor_changed_in_place_after_it_left_is_as_it_was_when_saved():
    model, x = MLP(depth=2), torch.randn(32, 64)
    _, plain = losses_and_grads(model, [x])
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", prefetch_bytes=0, **RULE))
    losses_and_grads(model, [x], keeper)
    taken = []
    model.layers[0][0].register_forward_hook(lambda module, args, output: taken.append(output))
    model.zero_grad()
    with keeper.step():
        loss = model(x)
        with torch.no_grad():
            taken[0].zero_()
        loss.backward()
    assert same([p.grad for p in model.parameters()], plain)


def test_a_tensor_changed_in_place_while_it_leaves_is_refused(monkeypatch):
    """As autograd would without a keeper: the copy may have read either."""
    model, x = MLP(depth=3), torch.randn(32, 64)
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", **RULE))
    losses_and_grads(model, [x], keeper)
    monkeypatch.setattr(transfers, "is_done", lambda event: False)
    taken = []
    model.layers[0][0].register_forward_hook(lambda module, args, output: taken.append(output))
    model.layers[1].register_forward_pre_hook(_zeroing(taken))
    with keeper.step():
        loss = model(x)
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()


def _zeroing(taken):
    def hook(module, args):
        taken[0].detach().zero_()

    return hook


def test_homes_mix():
    model = Stack(depth=3)
    x, count = batch(20)
    plain = run(model, x, count)
    rules = [
        ps.Rule("layers.0.experts", "offload", prefetch_bytes=0, **RULE),
        ps.Rule("layers.1.experts", "stash", min_bytes=256),
        ps.Rule("layers.*.norm", "offload", prefetch_bytes=0, **RULE),
    ]
    keeper = keeper_for(model, *rules)
    for _ in range(3):
        assert same(run(model, x, count, keeper), plain)
    stats = keeper.stats()
    assert stats.homes["offload"].peak > 0
    assert stats.homes["stash"].peak > 0
    nothing_left(keeper)


def test_a_backward_that_comes_a_step_later():
    model, x = TwoParts(), torch.randn(32, 64)
    keeper = keeper_for(model, ps.Rule("*", "offload", prefetch_bytes=0, **RULE))

    def both(around):
        model.zero_grad()
        with around():
            early = model.a(x).square().sum()
        with around():
            (model.b(x * 2).square().sum() + early).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = both(nullcontext)
    for _ in range(3):
        assert same(both(keeper.step), plain)
    nothing_left(keeper)


def test_a_copy_that_fails_leaves_nothing_behind(monkeypatch):
    model, x = MLP(), torch.randn(32, 64)
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", prefetch_bytes=0, **RULE))
    plain = losses_and_grads(model, [x])

    def fail(*_, **__):
        raise MemoryError("no")

    with monkeypatch.context() as patch:  # in the measured step
        patch.setattr("pagestash.saved.offload.moving.ordinary_extent", fail)
        with pytest.raises(MemoryError), keeper.step():
            model(x)
    assert same(losses_and_grads(model, [x], keeper), plain)
    with monkeypatch.context() as patch:  # and in one that has a plan
        patch.setattr(Transfers, "move_out", fail)
        with pytest.raises(MemoryError), keeper.step():
            model(x)
    nothing_left(keeper)
    assert same(losses_and_grads(model, [x], keeper), plain)


def test_a_tensor_changed_while_it_leaves_is_refused_also_if_asked_for_first(monkeypatch):
    model, x = TwoParts(), torch.randn(32, 64)
    keeper = keeper_for(model, ps.Rule("*", "offload", **RULE))
    for _ in range(2):
        with keeper.step():
            (model.b(model.a(x).relu()).square().sum()).backward()
    monkeypatch.setattr(transfers, "is_done", lambda event: False)
    moving(keeper).plan.stays = frozenset()
    with keeper.step():
        y = x * 1.0
        loss = model.b(y).sum()
        y.zero_()
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()


def test_tensors_that_leave_whole_need_no_pages():
    """A pool would have its overflow read after every step, and so make the host wait for the device."""
    model = Stack(depth=3)
    keeper = keeper_for(model, ps.Rule("layers.*.experts", "offload", prefetch_bytes=0, **RULE))
    x, count = batch(CAPACITY)
    plain = run(model, x, count)
    for _ in range(2):
        assert same(run(model, x, count, keeper), plain)
    assert keeper._offload.tally.peak
    assert keeper.pool is None


def test_what_a_freed_graph_held_is_counted_no_more():
    model, x = MLP(), torch.randn(32, 64)
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", prefetch_bytes=0, **RULE))
    for _ in range(3):
        with keeper.step():
            loss, looked_at = model(x).sum(), model(x).sum()  # of which one is only looked at
            loss.backward()
        del loss, looked_at
        assert keeper.stats().homes["offload"].bytes == 0
        assert keeper.held()["offload"] == 0
