"""Pools that are too small, on a GPU: headers read back late in eager steps; scalers and generators in a graph."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pagestash as ps

sys.path.insert(0, str(Path(__file__).parents[1] / "saved"))
from stack import Stack, batch, policy, run
from support import same
from support.steps import training_step

pytestmark = pytest.mark.gpu
HOLD = 100_000_000  # clock cycles: about 50 ms on an H200, far longer than anything it holds back


def held(model, arguments, keeper, cycles):
    """As `run`, with the compute stream held back before each forward, so that nothing is read back in time."""
    model.zero_grad()
    torch.manual_seed(1)
    with keeper.step():
        torch.cuda._sleep(cycles)
        loss = model(*arguments)
        loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


# --- eager: keep ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cycles", [0, HOLD], ids=["", "held back"])
@pytest.mark.parametrize("pool", [{}, {"device": 256 * 40}, {"device": 256 * 4, "host": 256 * 60}])
def test_what_finds_no_page_stays_and_the_bits_are_the_same(pool, cycles):
    torch.manual_seed(0)
    model = Stack().cuda()
    keeper = ps.Keeper(policy(headroom=1.0, **pool)).attach(model)
    for rows in (8, 8, 64, 64, 20, 64, 1):
        arguments = batch(rows, rows, "cuda")
        assert same(held(model, arguments, keeper, cycles), run(model, *arguments))
    stats = keeper.stats()
    assert not stats.overflow
    assert stats.no_page.groups > 0
    assert (stats.no_page.bytes, stats.pool.device.in_use, stats.pool.host.in_use) == (0, 0, 0)


def test_rows_that_fit_are_stashed_though_their_capacity_would_not():
    """The host waits for headers, and for the last group's count, rather than keep what there is room for."""
    torch.manual_seed(0)
    model = Stack().cuda()
    keeper = ps.Keeper(policy(headroom=1.0)).attach(model)
    for _ in range(4):
        arguments = batch(20, 20, "cuda")
        assert same(held(model, arguments, keeper, HOLD), run(model, *arguments))
    stats = keeper.stats()
    assert stats.no_page.groups == 0
    assert stats.pool.device.peak == stats.pool.device.pages


def test_a_steady_step_of_whole_tensors_never_makes_the_host_wait():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).cuda()
    rules = [ps.Rule("*", "stash", min_bytes=0)]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=1024))).attach(model)
    x = torch.randn(64, 64, device="cuda")

    def step():
        with keeper.step():
            model(x).sum().backward()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert keeper.stats().no_page.groups == 0


# --- in a graph -------------------------------------------------------------------------------------------------


def scaled(clip, **pool):
    torch.manual_seed(0)
    model = Stack().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    keeper = ps.Keeper(policy(headroom=1.0, **pool)).attach(model)

    def train_step(x, rows, blow):
        loss = model(x, rows)
        scaler.scale(loss * blow).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer, scaler=scaler)
    torch.manual_seed(5)
    losses = []
    for number, rows in enumerate((8, 8, 8, 50, 12, 64, 64, 3)):
        # Infinite gradients in a step that overflows and in one that does not.
        blow = torch.tensor(float("inf") if number in (5, 6) else 1.0, device="cuda")
        losses.append(step(*batch(rows, number, "cuda"), blow))
    step.wait()
    counts = [state["step"] for state in optimizer.state.values()]
    assert all(int(count) == 6 for count in counts)
    return [torch.stack(losses), scaler._scale, scaler._growth_tracker, *model.parameters()], step.reruns


@pytest.mark.parametrize("clip", [False, True], ids=["", "unscaled and clipped"])
def test_a_scaler_in_a_graph_ends_as_with_a_large_pool(clip):
    short, large = scaled(clip), scaled(clip, device="4MiB")
    assert short[1] > 0
    assert large[1] == 0
    assert same(short[0], large[0])


def test_a_momentum_encoder_ends_as_with_a_large_pool():
    ends = []
    for pool in ({}, {"device": "4MiB"}):
        torch.manual_seed(0)
        model, slow = Stack().cuda(), Stack().cuda().requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        keeper = ps.Keeper(policy(headroom=1.0, **pool)).attach(model)

        def train_step(x, rows, model=model, slow=slow, optimizer=optimizer):
            with torch.no_grad():
                for own, moved in zip(model.parameters(), slow.parameters()):
                    moved.data.mul_(0.9).add_(own, alpha=0.1)
                aim = slow(x, rows)
            loss = model(x, rows) + aim
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = ps.GraphedStep(train_step, keeper, optimizer=optimizer, state=[slow])
        losses = [step(*batch(rows, i, "cuda")) for i, rows in enumerate((8, 8, 8, 60, 20, 60))]
        step.wait()
        assert (step.reruns > 0) == (not pool)
        ends.append([torch.stack(losses), *model.parameters(), *slow.parameters(), slow.seen])
    assert same(*ends)


def test_a_generator_of_the_device_is_part_of_the_graph():
    ends = []
    for pool in ({}, {"device": "4MiB"}):
        torch.manual_seed(0)
        model = Stack().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        keeper = ps.Keeper(policy(headroom=1.0, **pool)).attach(model)
        generator = torch.Generator("cuda").manual_seed(3)

        def train_step(x, rows, model=model, optimizer=optimizer, generator=generator):
            noise = torch.rand(x.shape, generator=generator, device="cuda")
            loss = model(x + noise, rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = ps.GraphedStep(train_step, keeper, optimizer=optimizer, generators=[generator])
        losses = [step(*batch(rows, i, "cuda")) for i, rows in enumerate((8, 8, 8, 60, 20, 60))]
        step.wait()
        assert (step.reruns > 0) == (not pool)
        ends.append([torch.stack(losses), *model.parameters()])
    assert same(*ends)
    assert ends[0][0].unique().numel() == 6


def test_a_generator_of_the_device_that_nobody_named_is_refused_in_the_capture():
    model = Stack().cuda()
    keeper = ps.Keeper(policy(device="4MiB")).attach(model)
    generator = torch.Generator("cuda").manual_seed(3)

    def train_step(x, rows):
        model(x + torch.rand(x.shape, generator=generator, device="cuda"), rows).backward()

    step = ps.GraphedStep(train_step, keeper, warmup=1)
    step(*batch(8, 0, "cuda"))
    with pytest.raises(RuntimeError, match="capture"):
        step(*batch(8, 0, "cuda"))


def test_a_buffer_that_forward_replaces_is_refused_before_the_capture():
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = Stack(1)
            self.register_buffer("ema", torch.zeros(32))

        def forward(self, x, rows):
            self.ema = 0.9 * self.ema + 0.1 * x.mean(0)
            return self.stack(x - self.ema, rows)

    model = Averaging().cuda()
    rules = [ps.Rule("stack.layers.*.experts", "stash", min_bytes=256)]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=256))).attach(model)

    def train_step(x, rows):
        model(x, rows).backward()

    with pytest.raises(ValueError, match="replaces the buffer 'ema'"):
        ps.GraphedStep(train_step, keeper)(*batch(8, 0, "cuda"))


def test_buffers_on_the_host_and_odd_ones_do_no_harm_in_a_graph():
    torch.manual_seed(0)
    model = Stack().cuda()
    with torch.inference_mode():
        model.register_buffer("inference", torch.ones(32, device="cuda"))
    model.register_buffer("expanded", torch.ones(1, device="cuda").expand(32))
    model.register_buffer("sparse", torch.eye(4, device="cuda").to_sparse())
    model.register_buffer("on_host", torch.ones(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    keeper = ps.Keeper(policy(headroom=1.0)).attach(model)
    step = ps.GraphedStep(training_step(model, optimizer), keeper, optimizer=optimizer)
    losses = [step(*batch(rows, i, "cuda")) for i, rows in enumerate((8, 8, 8, 60, 20))]
    step.wait()
    assert step.reruns > 0
    assert torch.isfinite(torch.stack(losses)).all()
    assert torch.equal(model.sparse.to_dense(), torch.eye(4, device="cuda"))
    assert torch.equal(model.expanded, torch.ones(32, device="cuda"))
