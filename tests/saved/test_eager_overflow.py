"""An eager step whose pool is too small: what finds no page stays, or the step is refused by name."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pagestash as ps

sys.path.insert(0, str(Path(__file__).parent))
from stack import CAPACITY, Stack, batch, policy, run
from support import same
from support.tiers import slow


def sized(model=None, rows=8, **pool):
    """A model and a keeper whose pool has what `rows` valid rows need."""
    model = model or Stack()
    keeper = ps.Keeper(policy(headroom=1.0, **pool), backend="torch").attach(model)
    run(model, *batch(rows), keeper)
    assert keeper.pool is not None
    return model, keeper


# --- keep -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", *slow("triton")], indirect=True)
def test_what_finds_no_page_stays_and_the_pool_grows_when_the_step_is_over(backend):
    model = Stack()
    keeper = ps.Keeper(policy(headroom=1.0), backend=backend).attach(model)
    run(model, *batch(8), keeper)
    small = keeper.pool.device_pages
    for _ in range(2):
        assert same(run(model, *batch(60), keeper), run(model, *batch(60)))
    stats = keeper.stats()
    assert not stats.overflow
    assert keeper.pool.device_pages > small
    assert 0 < stats.no_page.groups < 4, "the second time all of it fits"
    assert stats.no_page.peak > 0
    assert (stats.no_page.bytes, stats.homes["keep"].bytes, stats.pool.device.in_use) == (0, 0, 0)
    keeper.reset_peaks()
    run(model, *batch(60), keeper)
    assert keeper.stats().no_page == type(stats.no_page)(0, 0, 0)


def test_a_pool_grown_for_what_stayed_has_what_the_step_wanted():
    model, keeper = sized()
    run(model, *batch(60), keeper)
    exact = sized(rows=60)[1].pool.device_pages
    assert keeper.pool.device_pages == exact


def test_a_group_that_fits_exactly_is_stashed():
    """The worst case would not fit; the rows that there are do."""
    model, keeper = sized(rows=20)
    for rows in (20, 19, 20):
        assert same(run(model, *batch(rows), keeper), run(model, *batch(rows)))
    stats = keeper.stats()
    assert stats.no_page.groups == 0
    assert stats.pool.device.peak == stats.pool.device.pages


def test_gradients_of_accumulated_microbatches_are_untouched():
    model, keeper = sized()
    plain = Stack()
    plain.load_state_dict(model.state_dict())
    for each, step in ((plain, None), (model, keeper)):
        torch.manual_seed(3)
        each.zero_grad()
        for seed, rows in enumerate((8, 64, 12, 40)):
            if step is None:
                each(*batch(rows, seed)).backward()
            else:
                with step.step():
                    each(*batch(rows, seed)).backward()
    assert keeper.stats().no_page.groups > 0
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


def test_several_forwards_wait_beside_each_other():
    """The pool has room for one of them, and a later one takes the pages that an earlier one gave back."""
    model, keeper = sized(rows=40)

    def both(step):
        torch.manual_seed(2)
        model.zero_grad()
        losses = [model(*batch(40, seed)) for seed in range(3)]
        losses[0].backward()
        losses.append(model(*batch(30, 3)))
        for loss in losses[1:]:
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = both(None)
    with keeper.step():
        got = both(keeper)
    assert same(expected, got)
    assert keeper.stats().no_page.groups > 0


def test_pages_that_an_interrupt_lost_are_not_promised_again(monkeypatch):
    """It came behind the launch that reserved them, before anybody had their tickets."""
    model, keeper = sized(rows=60)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(keeper.pool.room), "reserved", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                run(model, *batch(60), keeper)
    for _ in range(3):
        assert same(run(model, *batch(60), keeper), run(model, *batch(60)))
    assert not keeper.stats().overflow


def test_a_step_that_failed_is_no_reason_to_grow():
    model, keeper = sized(rows=44)
    run(model, *batch(44), keeper)

    def failing():
        with keeper.step():
            model(*batch(60))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert same(run(model, *batch(4), keeper), run(model, *batch(4)))


def test_spill_pages_count_as_room():
    model, keeper = sized(host=256 * 700, device=256 * 4)
    assert same(run(model, *batch(CAPACITY), keeper), run(model, *batch(CAPACITY)))
    assert keeper.stats().no_page.groups == 0
    model, keeper = sized(host=256 * 30, device=256 * 4)
    assert same(run(model, *batch(CAPACITY), keeper), run(model, *batch(CAPACITY)))
    assert keeper.stats().no_page.groups > 0


def test_without_memory_to_grow_the_pool_goes_on_as_it_is(monkeypatch, caplog):
    model, keeper = sized()

    def fail(**_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(keeper.pool, "grow", fail)
    for _ in range(2):
        assert same(run(model, *batch(60), keeper), run(model, *batch(60)))
    assert "no memory to grow the pool" in caplog.text


def test_a_steady_step_whose_groups_are_certain_to_fit_asks_the_device_for_nothing(monkeypatch):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
    rules = [ps.Rule("*", "stash", min_bytes=0)]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=256)), backend="torch").attach(model)

    def step():
        with keeper.step():
            model(torch.randn(16, 32)).sum().backward()

    step()
    room = keeper.pool.room
    monkeypatch.setattr(type(room), "count", lambda self: pytest.fail("waited for the device"))
    monkeypatch.setattr(type(room), "_read", lambda self, tickets: pytest.fail("read a header back"))
    for _ in range(3):
        step()
        assert not room.unsure


def test_a_kept_tensor_changed_in_place_is_refused():
    class Layer(nn.Module):
        def forward(self, x):
            self.y = x * 2
            return self.y.square().sum()

    model = nn.Sequential(Layer())
    rules = [ps.Rule("0", "stash", min_bytes=16)]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=256, device=256)), backend="torch").attach(model)
    with keeper.step():
        loss = model(torch.randn(400, requires_grad=True))
        model[0].y.add_(1)
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()


def test_the_remainder_of_offloaded_rows_stays_where_it_finds_no_page():
    model = Stack()
    rules = [ps.Rule("layers.*.experts", "offload", min_bytes=256, fraction=0.5)]
    pool = ps.PoolConfig(page=256, headroom=1.0, host="4MiB")
    keeper = ps.Keeper(ps.Policy(rules, pool), backend="torch").attach(model)
    for rows in (8, 8, 60, 60, 20):
        assert same(run(model, *batch(rows), keeper), run(model, *batch(rows)))
    stats = keeper.stats()
    assert stats.no_page.groups > 0
    assert stats.no_page.bytes == 0


def test_what_takes_pages_without_asking_is_still_found():
    _, keeper = sized()
    with pytest.raises(ps.PoolOverflow, match="were wanted"), keeper.step():
        keeper.pool.reserve((4096, 32), torch.float32, torch.tensor(4096))
    assert not keeper.stats().overflow


# --- raise ----------------------------------------------------------------------------------------------------


def test_an_overflowing_step_raises_and_the_next_one_fits():
    model, keeper = sized(on_overflow="raise")
    with pytest.raises(ps.PoolOverflow, match="were wanted"):
        run(model, *batch(64), keeper)
    assert keeper.stats().pool.device.in_use == 0
    assert same(run(model, *batch(64), keeper), run(model, *batch(64)))


def test_an_overflow_of_a_step_that_was_interrupted_is_not_the_next_ones():
    model, keeper = sized(on_overflow="raise")

    def overflow_and_stop():
        with keeper.step():
            model(*batch(64))
            assert keeper.stats().overflow
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        overflow_and_stop()
    assert same(run(model, *batch(8), keeper), run(model, *batch(8)))


def test_an_error_of_a_step_that_overflowed_is_told_as_the_overflow():
    model, keeper = sized(on_overflow="raise")

    def fail():
        with keeper.step():
            model(*batch(64)).backward()
            raise ArithmeticError("not finite")

    with pytest.raises(ps.PoolOverflow, match="were wanted") as caught:
        fail()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    with pytest.raises(ArithmeticError):
        fail()


def test_recomputed_inputs_that_found_no_page_are_no_fault_of_the_forward():
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(3)
    ]
    model = nn.Sequential(*layers)
    rules = [ps.Rule("*.0", "recompute"), ps.Rule("*", "stash", min_bytes=0)]

    def gradients(rows, keeper=None):
        model.zero_grad()
        x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
        if keeper is None:
            model(x).square().mean().backward()
        else:
            with keeper.step():
                model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    for on_overflow in ("keep", "raise"):
        pool = ps.PoolConfig(page=256, headroom=1.0, on_overflow=on_overflow)
        keeper = ps.Keeper(ps.Policy(rules, pool), backend="torch").attach(model)
        gradients(8, keeper)
        before = keeper.pool.device_pages
        if on_overflow == "raise":
            with pytest.raises(ps.PoolOverflow):
                gradients(64, keeper)
            assert keeper.pool.device_pages > before
        got = gradients(64, keeper)
        assert keeper.pool.device_pages > before
        keeper.detach()
        assert same(got, gradients(64))
