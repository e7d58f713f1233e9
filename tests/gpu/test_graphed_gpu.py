"""The keeper and the graphed step on a GPU: one graph, no host in a steady step, overflow to the same bits."""

import sys
from pathlib import Path

import pytest
import torch

import pagestash as ps

sys.path.insert(0, str(Path(__file__).parents[1] / "saved"))
from stack import CAPACITY, Stack, batch, policy, run
from support import same
from support.steps import training_step

pytestmark = pytest.mark.gpu
HOLD = 100_000_000  # clock cycles: about 50 ms on an H200, far longer than anything it holds back


def make(seed=0, warmup=2, rules=None, **pool):
    torch.manual_seed(seed)
    model = Stack().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    keeper = ps.Keeper(rules or policy(headroom=1.0, **pool)).attach(model)
    step = ps.GraphedStep(training_step(model, optimizer), keeper, optimizer=optimizer, warmup=warmup)
    return model, optimizer, keeper, step


def everything(model, optimizer):
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers(), *state]]


def train(made, rows, seed=5):
    _, _, _, step = made
    torch.manual_seed(seed)
    losses = [step(*batch(count, number, "cuda")) for number, count in enumerate(rows)]
    step.wait()
    return losses


POOLS = {"device": {}, "spilling": {"device": 256 * 20, "host": "1MiB"}}


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("rows", [0, 1, 20, CAPACITY])
def test_losses_and_gradients_are_the_same_to_the_last_bit(pool, rows):
    torch.manual_seed(0)
    model = Stack().cuda()
    x, count = batch(rows, 0, "cuda")
    plain = run(model, x, count)
    keeper = ps.Keeper(policy(headroom=2.0, **pool)).attach(model)
    for _ in range(3):
        assert same(run(model, x, count, keeper), plain)
    if keeper.pool is not None:
        stats = keeper.stats()
        assert stats.pool.device.in_use == stats.pool.host.in_use == 0


def test_a_steady_step_never_makes_the_host_wait():
    made = make(device="4MiB")
    train(made, [20] * 4)
    batches = [batch(rows, rows, "cuda") for rows in (20, 64, 3, 0, 40, 20)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [made[3](*each) for each in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made[3].wait()
    assert made[3].reruns == 0
    assert torch.isfinite(torch.stack(losses)).all()


def test_a_graph_gives_the_bits_of_eager_steps():
    rows = [20, 30, 10, 40, 64, 1]
    eager, graphed = make(device="4MiB", warmup=100), make(device="4MiB")
    assert same(train(eager, rows), train(graphed, rows))
    assert same(everything(*eager[:2]), everything(*graphed[:2]))


@pytest.mark.parametrize("rows", [[8, 8, 8, 50, 12, 64, 64], [8, 8, 60], [8, 8, 60, 61, 62, 63, 64, 64]])
def test_a_short_pool_ends_with_the_bits_of_a_large_one(rows):
    short, large = make(), make(device="4MiB")
    losses = train(short, rows), train(large, rows)
    assert short[3].reruns > 0
    assert large[3].reruns == 0
    assert same(*losses)
    assert same(everything(*short[:2]), everything(*large[:2]))
    stats = short[2].stats()
    assert not stats.overflow
    assert stats.pool.device.in_use == 0


def test_an_overflowing_replay_changes_no_parameter_state_or_buffer(caplog):
    made = make()
    train(made, [8, 8, 8])
    before = everything(*made[:2])
    loss = made[3](*batch(64, 9, "cuda"))
    torch.cuda.synchronize()
    assert torch.isnan(loss)
    assert same(before, everything(*made[:2]))
    made[3].wait()
    assert "has grown" in caplog.text
    assert torch.isfinite(loss)
    assert made[0].seen == 4


def test_host_pages_take_what_does_not_fit_in_a_graph():
    rows = [20, 20, 20, 64, 30, 64]
    spilling, large = make(device=256 * 40, host="1MiB"), make(device="4MiB")
    assert same(train(spilling, rows), train(large, rows))
    assert same(everything(*spilling[:2]), everything(*large[:2]))
    assert spilling[3].reruns == 0
    assert spilling[2].stats().spilled_bytes > 0


@pytest.mark.parametrize("held", ["_out", "_in", "compute"])
def test_a_side_stream_or_the_compute_stream_held_back_changes_nothing(held):
    """Each hand-over between the streams, with one side far behind: a missing wait would show as other bytes."""
    torch.manual_seed(0)
    model = Stack().cuda()
    x, rows = batch(50, 0, "cuda")
    plain = run(model, x, rows)
    keeper = ps.Keeper(policy(device=256 * 10, host="1MiB")).attach(model)
    stash = keeper._stash._paged
    run(model, x, rows, keeper)
    if held == "compute":
        for method in ("put", "get"):
            original = getattr(stash, method)

            def late(*arguments, original=original):
                torch.cuda._sleep(HOLD // 20)
                return original(*arguments)

            setattr(stash, method, late)
    else:
        side = getattr(stash, held)
        after = side.after

        def slow(*events):
            with torch.cuda.stream(side._stream):
                torch.cuda._sleep(HOLD)
            return after(*events)

        side.after = slow
    for _ in range(3):
        # Whatever was freed too early is reused, and overwritten with NaN, while the copy is held back.
        junk = [torch.full((CAPACITY, 96), float("nan"), device="cuda") for _ in range(8)]
        del junk
        assert same(run(model, x, rows, keeper), plain)
    assert keeper.stats().spilled_bytes > 0


@pytest.mark.parametrize("missing", ["retire", "spilled", "arrived"])
def test_without_its_wait_each_hand_over_would_fail(missing, monkeypatch):
    """The test above can fail: take one wait away, hold the other side back, and the bytes differ."""
    torch.manual_seed(0)
    model = Stack().cuda()
    x, rows = batch(50, 0, "cuda")
    plain = run(model, x, rows)
    keeper = ps.Keeper(policy(device=256 * 10, host="1MiB")).attach(model)
    run(model, x, rows, keeper)
    stash = keeper._stash._paged
    side = stash._in if missing == "arrived" else stash._out
    after = side.after

    def slow(*events):
        with torch.cuda.stream(side._stream):
            torch.cuda._sleep(HOLD)
        return after(*events)

    monkeypatch.setattr(side, "after", slow)
    stash.pool.memory.host_slab.fill_(255)  # NaN, should it be read before it is written
    import pagestash.saved.paged as module

    real = module.wait_here
    if missing == "retire":

        def retire():
            stash._leaving = None
            # What comes next in the compute stream takes the freed memory.
            for size in (32, 96, 48):
                torch.full((CAPACITY, size), float("nan"), device="cuda")

        monkeypatch.setattr(stash, "_retire", retire)
        monkeypatch.setattr(module, "wait_here", lambda event: None if event is None else real(event))
    elif missing == "spilled":
        monkeypatch.setattr(stash, "_prefetch_before", lambda group: None)
        monkeypatch.setattr(stash, "_retire", lambda: setattr(stash, "_kept", stash._leaving))
        monkeypatch.setattr(module, "wait_here", lambda event: None)
    else:
        monkeypatch.setattr(module, "wait_here", lambda event: None)
    result = run(model, x, rows, keeper)
    torch.cuda.synchronize()
    assert not same(result, plain)


def test_changed_learning_rates_reach_the_graph():
    made, eager = make(device="4MiB"), make(device="4MiB", warmup=100)
    for _, optimizer, _, step in (made, eager):
        torch.manual_seed(5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda call: 1 / (1 + call))
        for number in range(6):
            step(*batch(20, number, "cuda"))
            schedule.step()
        step.wait()
    assert same(everything(*made[:2]), everything(*eager[:2]))


def test_another_shape_or_optimizer_is_refused():
    made = make(device="4MiB")
    train(made, [20] * 3)
    x, rows = batch(20, 0, "cuda")
    with pytest.raises(ValueError, match="captured with"):
        made[3](x[:10], rows)
    torch.manual_seed(0)
    model = Stack().cuda()
    keeper = ps.Keeper(policy()).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def train_step(x, rows):
        model(x, rows).backward()
        optimizer.step()
        optimizer.zero_grad()

    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer, warmup=1)
    step(x, rows)
    with pytest.raises(ValueError, match=r"SGD cannot skip an update.*fused=True"):
        step(x, rows)


def test_a_forward_without_backward_is_refused_in_a_graph():
    torch.manual_seed(0)
    model = Stack().cuda()
    keeper = ps.Keeper(policy(device="4MiB")).attach(model)
    kept = []

    def forward_only(x, rows):
        kept[:] = [model(x, rows)]

    step = ps.GraphedStep(forward_only, keeper, warmup=1)
    step(*batch(20, 0, "cuda"))
    with pytest.raises(RuntimeError, match="stashed tensors without a backward"):
        step(*batch(20, 0, "cuda"))


def test_memory_of_a_stashed_graph_is_smaller():
    """Twelve layers with capacity 4x: the graph holds valid rows, and worst-case buffers of one layer only."""
    from benchmarks.graphed_stack import measure

    stashed, plain = (
        measure(layers=6, capacity=32768, width=512, stash=on)["held_bytes"] for on in (True, False)
    )
    assert stashed < 0.6 * plain


def test_a_graph_that_is_captured_again_takes_the_memory_of_the_one_before(monkeypatch):
    """A graph's memory is its own: two of them at once would take twice as much."""
    size = 64 << 20
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    keeper = ps.Keeper(ps.Policy()).attach(model)

    def train_step(x):
        kept = torch.zeros(size, dtype=torch.uint8, device="cuda")
        loss = model(x).square().mean() + kept[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
    for _ in range(3):
        step(torch.randn(4, 8, device="cuda"))
    step.wait()
    before = torch.cuda.memory_reserved()
    monkeypatch.setattr(step, "_grow", lambda: True)
    for _ in range(3):
        step._grow_and_capture()
    assert torch.cuda.memory_reserved() < before + size
    step(torch.randn(4, 8, device="cuda"))
    step.wait()
