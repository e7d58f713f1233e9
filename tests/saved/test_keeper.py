"""The keeper: same bits with and without it, and a pool that is empty again after every kind of step."""

import threading
from itertools import product

import pytest
import torch
from stack import CAPACITY, POOLS, Stack, batch, in_use, policy, run
from support import same
from support.tiers import slow, slow_but
from torch.utils.checkpoint import checkpoint

import pagestash as ps
from pagestash.pages.telemetry import PoolStats, TierStats
from pagestash.policy import HOMES
from pagestash.saved.home import HomeStats
from pagestash.saved.stats import KeeperStats, NoPageStats, OffloadStats

EACH_POOL = list(product(["torch", "triton"], POOLS))


@pytest.mark.parametrize(
    ("backend", "pool"), slow_but([*EACH_POOL[:3], ("triton", "measured")], EACH_POOL), indirect=["backend"]
)
@pytest.mark.parametrize("rows", [20, *slow(0, 1, CAPACITY)])
def test_losses_and_gradients_are_the_same_to_the_last_bit(backend, pool, rows):
    model, pool = Stack(depth=2), POOLS[pool]
    x, count = batch(rows)
    plain = run(model, x, count)
    keeper = ps.Keeper(policy(headroom=2.0, **pool), backend=backend).attach(model)
    for _ in range(3):
        try:
            result = run(model, x, count, keeper)
        except ps.PoolOverflow:
            pytest.fail("the pool was large enough")
        assert same(result, plain)
    if rows:
        assert in_use(keeper) == 0
        assert (keeper.stats().spilled_bytes > 0) == (bool(pool) and (rows >= 20 or pool["device"] == 256))


def test_a_forward_in_another_thread_is_left_alone(sized):
    """As when autograd runs a checkpointed forward again, in a thread of its own on a GPU."""
    model, keeper, _ = sized
    x, rows = batch(20)
    results = []
    with keeper.step():
        thread = threading.Thread(target=lambda: results.append(model(x, rows)))
        thread.start()
        thread.join()
    assert len(results) == 1


# --- the pool is empty again ---


def test_backward_twice_over_one_graph(sized):
    model, keeper, plain = sized
    x, rows = batch(20)
    model.zero_grad()
    torch.manual_seed(1)
    with keeper.step():
        loss = model(x, rows)
        loss.backward(retain_graph=True)
        assert keeper.stats().pool.device.in_use > 0
        loss.backward()
    assert same([p.grad for p in model.parameters()], [2 * g for g in plain[1]])
    assert in_use(keeper) == 0


def test_unpacking_twice_restores_twice(sized):
    model, keeper, _ = sized
    x, rows = batch(20)
    x.requires_grad_()
    with keeper.step():
        loss = model(x, rows)
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        weights = torch.autograd.grad(loss, list(model.parameters()))
    torch.manual_seed(1)
    assert first.abs().sum() > 0
    assert all(w.abs().sum() > 0 for w in weights)
    del loss
    assert in_use(keeper) == 0


def test_gradient_accumulation_over_microbatches(sized):
    model, keeper, _ = sized
    parts = [batch(rows, seed) for seed, rows in enumerate((20, 3, 40))]
    model.zero_grad()
    torch.manual_seed(1)
    for x, rows in parts:
        model(x, rows).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    keeper.pool.grow(device_pages=4096)
    model.zero_grad()
    torch.manual_seed(1)
    with keeper.step():
        for x, rows in parts:
            model(x, rows).backward()
    assert same([p.grad for p in model.parameters()], plain)
    assert in_use(keeper) == 0


def test_all_forwards_before_all_backwards_first_in_first_out(sized):
    model, keeper, _ = sized
    keeper.pool.grow(device_pages=4096)
    parts = [batch(rows, seed) for seed, rows in enumerate((20, 3, 40, 64))]
    plain = [run(model, *part) for part in parts]
    losses, results = [], []
    with keeper.step():
        for part in parts:
            torch.manual_seed(1)
            losses.append(model(*part))
        while losses:
            model.zero_grad()
            loss = losses.pop(0)
            loss.backward()
            results.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
            del loss
    assert all(same(a, b) for a, b in zip(results, plain))
    assert in_use(keeper) == 0


def test_passes_without_gradients_between_steps_leave_nothing(sized):
    model, keeper, plain = sized
    x, rows = batch(20)
    with torch.no_grad():
        model(x, rows)
    with keeper.step(), torch.no_grad():
        model(x, rows)
    model.eval()
    with keeper.step():
        with torch.no_grad():
            model(x, rows)
        model(x, rows)  # with gradients, and no backward
    model.train()
    assert in_use(keeper) == 0
    assert same(run(model, x, rows, keeper), plain)


def test_a_pass_without_gradients_does_not_count_as_the_measured_step():
    model = Stack()
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    with keeper.step(), torch.no_grad():
        model(*batch(20))
    assert keeper.pool is None
    run(model, *batch(20), keeper)
    assert keeper.pool is not None


def test_an_exception_in_mid_forward_leaves_nothing(sized):
    model, keeper, plain = sized
    x, rows = batch(20)

    def fail(module, args):
        raise KeyError("mid-forward")

    for layer in (model.layers[2], model.layers[1].experts.down):
        hook = layer.register_forward_pre_hook(fail)
        with pytest.raises(KeyError, match="mid-forward"), keeper.step():
            model(x, rows)
        hook.remove()
        assert in_use(keeper) == 0
    assert same(run(model, x, rows, keeper), plain)


def test_an_exception_in_mid_backward_leaves_nothing(sized):
    model, keeper, plain = sized
    x, rows = batch(20)

    def fail(grad):
        raise KeyError("mid-backward")

    hook = model.layers[1].experts.down.weight.register_hook(fail)
    with pytest.raises(KeyError, match="mid-backward"), keeper.step():
        model(x, rows).backward()
    hook.remove()
    # Autograd itself holds on to the failed backward until the thread runs the next one.
    assert in_use(keeper) == 0
    assert same(run(model, x, rows, keeper), plain)
    assert in_use(keeper) == 0


def test_a_forward_whose_backward_never_runs_leaves_nothing(sized):
    model, keeper, _ = sized
    with keeper.step():
        loss = model(*batch(20))
    assert keeper.stats().pool.device.in_use > 0
    del loss
    assert in_use(keeper) == 0


# --- pools, keepers ---


def test_a_pool_of_host_pages_alone():
    model = Stack()
    x, count = batch(20)
    plain = run(model, x, count)
    keeper = ps.Keeper(policy(device=0, host="1MiB"), backend="torch").attach(model)
    assert keeper.pool is not None
    assert keeper.pool.device_pages == 0
    assert same(run(model, x, count, keeper), plain)


def test_a_fixed_pool_is_there_from_the_start():
    keeper = ps.Keeper(policy(device="1MiB"), backend="torch").attach(Stack())
    assert keeper.pool is not None
    assert keeper.pool.device_pages * keeper.pool.page_bytes == 1 << 20


def test_two_keepers_in_one_process_do_not_mix():
    first, second = Stack(), Stack()
    x, rows = batch(20)
    plain = run(first, x, rows), run(second, x, rows)
    keepers = [ps.Keeper(policy(), backend="torch").attach(model) for model in (first, second)]
    for _ in range(2):
        model_results = [run(model, x, rows, keeper) for model, keeper in zip((first, second), keepers)]
        assert same(model_results[0], plain[0])
        assert same(model_results[1], plain[1])
    assert keepers[0].pool is not keepers[1].pool
    first.zero_grad(), second.zero_grad()
    torch.manual_seed(1)
    with keepers[0].step(), keepers[1].step():
        loss = first(x, rows) + second(x, rows)
        loss.backward()
    del loss
    assert [in_use(keeper) for keeper in keepers] == [0, 0]


def test_a_step_inside_a_step_is_refused(sized):
    _, keeper, _ = sized
    with keeper.step(), pytest.raises(RuntimeError, match="one step at a time"), keeper.step():
        pass


def test_a_step_that_was_interrupted_before_it_began_is_not_open(sized, monkeypatch):
    model, keeper, plain = sized

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(keeper, "_note_weights", interrupted)
        with pytest.raises(KeyboardInterrupt), keeper.step():
            pass
    assert same(run(model, *batch(20), keeper), plain)


def test_detach_takes_every_hook_off(sized):
    model, keeper, plain = sized
    keeper.detach()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert same(run(model, *batch(20), keeper), plain)


def test_checkpoint_outside_a_region_gives_the_same_bits(sized):
    model, keeper, _ = sized
    x, rows = batch(20)
    x.requires_grad_()

    def loss_of():
        torch.manual_seed(1)
        y = x
        for layer in model.layers:
            y = checkpoint(layer, y, rows, use_reentrant=False)
        return y[:20].square().sum()

    model.zero_grad()
    loss_of().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with keeper.step():
        loss_of().backward()
    assert same([p.grad for p in model.parameters()], plain)
    assert in_use(keeper) == 0


def test_held_tells_each_home_without_waiting():
    torch.manual_seed(0)
    model = Stack()
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    x, rows = batch(20)
    told = []
    for _ in range(2):  # measured, then in pages
        with keeper.step():
            loss = model(x, rows)
            held, stats = keeper.held(), keeper.stats()
            told.append({home: int(size) for home, size in held.items()})
            assert told[-1] == {home: each.bytes for home, each in stats.homes.items()}
            assert list(told[-1]) == list(stats.homes) == list(HOMES)
            loss.backward()
    assert told[0] == told[1]
    assert told[0]["stash"] > 0
    assert int(keeper.held()["stash"]) == 0


def test_stats_print_as_a_table():
    def tier(pages):
        return TierStats(pages=pages, in_use=pages // 2, peak=pages, wanted=pages, page_bytes=1 << 16)

    stats = KeeperStats(
        homes={"keep": HomeStats(0, 3 << 20), "stash": HomeStats(5 << 30, 2000 << 30)},
        regions={"layers.0": HomeStats(0, 3 << 20)},
        pool=PoolStats(
            device=tier(32), host=tier(16), valid_bytes=0, valid_bytes_peak=0, spilled_bytes=0, refused_groups=2,
            required=3, given_up_groups=12, overflow=True,
        ),
        offload=OffloadStats(host_bytes=3 << 30, limit=100 << 30, refused=0, refused_peak=1 << 20),
        no_page=NoPageStats(groups=2, bytes=0, peak=1 << 16),
    )  # fmt: skip
    assert str(stats).splitlines() == [
        "                   now        peak",
        "keep               0 B     3.0 MiB",
        "stash          5.0 GiB     2.0 TiB",
        "pool           1.0 MiB     2.0 MiB  of 2.0 MiB",
        "host pages   512.0 KiB     1.0 MiB  of 1.0 MiB",
        "overflow: yes",
        "found no page, and were recomputed: 12 groups",
        "found no page, and were kept: 2 groups, 64.0 KiB",
        "pinned for offload: 3.0 GiB of 100.0 GiB",
        "found no pinned memory, and were kept: 1.0 MiB",
    ]
    assert str(KeeperStats({"keep": HomeStats(0, 5)}, {}, None)).splitlines()[1:] == [
        "keep               0 B         5 B"
    ]
