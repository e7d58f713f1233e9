"""`bits=8` on a GPU: the kernels agree with torch bit for bit, in every home, and in a CUDA graph."""

import gc

import pytest
import torch
from support import same
from torch import nn

import pagestash as ps
from pagestash.kernels.moe.route import route
from pagestash.kernels.pages import eight_bits
from pagestash.kernels.pages.eight_bits import BLOCK, FLOOR, CodeShape, decode, encode
from pagestash.moe import MoE, MoEConfig, Received
from pagestash.pages.pool import PagePool

pytestmark = pytest.mark.gpu
WIDTH, INNER, EXPERTS, TOP_K, TOKENS, DEPTH = 256, 128, 8, 2, 512, 4


@pytest.fixture(params=["instructions", "integers"])
def conversion(request, monkeypatch):
    """The device's own conversion of e4m3, or the one of integer operations for devices without."""
    if request.param == "instructions":
        if torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this device has no such instructions")
    else:
        monkeypatch.setattr(eight_bits, "converts", lambda device: False)


def all_values(dtype):
    """Every value of 16 bits in blocks with its neighbours, and in blocks with values of all sizes."""
    bits = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16)
    if dtype == torch.float32:
        wide = torch.randint(-(2**31), 2**31 - 1, (2**16,), device="cuda", dtype=torch.int64)
        return wide.to(torch.int32).view(dtype)
    mixed = bits[torch.randperm(len(bits), device="cuda")]
    return torch.cat([bits, bits.view(BLOCK, -1).t().reshape(-1), mixed]).view(dtype)


SHAPES = {
    "flat": lambda n: CodeShape.of(n),
    "rows": lambda n: CodeShape.of(n // 4096 * 4096, n // 4096),
    "rows of 200": lambda n: CodeShape.of(n // 200 * 200, n // 200),
    "rows of 3": lambda n: CodeShape.of(n // 3 * 3, n // 3),
}


@pytest.mark.parametrize("dtype", list(FLOOR), ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernels_agree_with_torch_bit_for_bit(conversion, dtype, shape):
    values = all_values(dtype)
    shape = shape(values.numel())
    values = values[: shape.values]
    made = {}
    for backend in ("triton", "torch"):
        codes = torch.zeros(shape.rows, shape.row_bytes, dtype=torch.uint8, device="cuda")
        out = torch.empty_like(values)
        encode(values, shape, codes, backend)
        decode(codes, shape, out, backend)
        made[backend] = codes, out
    assert torch.equal(made["triton"][0], made["torch"][0])
    torch.testing.assert_close(made["triton"][1], made["torch"][1], rtol=0, atol=0, equal_nan=True)
    finite = values.isfinite()
    assert made["triton"][1][finite].isfinite().all()
    assert torch.equal(made["triton"][1].isnan(), values.isnan())


@pytest.mark.parametrize("page", [144, 4096, 65536])
@pytest.mark.parametrize("rows", [0, 1, 37, 64])
def test_pages_hold_the_same_codes(conversion, page, rows):
    width = 384
    shape = CodeShape.of(64 * width, 64)
    x = torch.randn(64, width, device="cuda", dtype=torch.bfloat16)
    x[rows:] = float("nan")
    pool = PagePool("cuda", page, device_bytes=1 << 20)
    count = torch.tensor(rows, device="cuda")
    (ticket,) = pool.reserve_bytes([(shape.rows, shape.row_bytes)], count)
    encode(x.view(-1), shape, pool.pages_of(ticket), "triton")
    out = torch.full_like(x, 7.0)
    decode(pool.pages_of(ticket), shape, out.view(-1), "triton")
    codes = torch.empty(shape.rows, shape.row_bytes, dtype=torch.uint8, device="cuda")
    expected = torch.empty_like(x)
    encode(x.view(-1), shape, codes, "torch", count)
    decode(codes, shape, expected.view(-1), "torch")
    assert torch.equal(out, expected)
    assert not out[rows:].any()


def test_a_refused_group_comes_back_as_zeros():
    shape = CodeShape.of(64 * 256, 64)
    pool = PagePool("cuda", 4096, device_pages=1)
    (ticket,) = pool.reserve_bytes([(shape.rows, shape.row_bytes)], None)
    x = torch.randn(64 * 256, device="cuda", dtype=torch.bfloat16)
    encode(x, shape, pool.pages_of(ticket), "triton")
    out = torch.full_like(x, 7.0)
    decode(pool.pages_of(ticket), shape, out, "triton")
    assert bool(pool.overflow)
    assert not out.any()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("width", [2048, 200])
@pytest.mark.parametrize("rows", [0, 1, 3000, 20000])
def test_without_a_tail_only_valid_rows_are_read_and_written(conversion, paged, width, rows):
    """Of 20,000 rows of 2048 values a program has many tiles, one after the other."""
    shape = CodeShape.of(20000 * width, 20000)
    x = torch.randn(20000, width, device="cuda", dtype=torch.bfloat16)
    wanted = torch.empty_like(x)
    codes = torch.empty(shape.rows, shape.row_bytes, dtype=torch.uint8, device="cuda")
    encode(x.view(-1), shape, codes, "torch")
    decode(codes, shape, wanted.view(-1), "torch")
    codes.fill_(0x55)
    count = torch.tensor([rows], device="cuda", dtype=torch.int32)
    x[rows:] = float("nan")
    valid, where = count, codes
    if paged:
        pool = PagePool("cuda", 65536, device_bytes=64 << 20)
        (ticket,) = pool.reserve_bytes([(shape.rows, shape.row_bytes)], count)
        valid, where = None, pool.pages_of(ticket)
    out = torch.full_like(x, 7.0)
    encode(x.view(-1), shape, where, "triton", valid, tail=False)
    decode(where, shape, out.view(-1), "triton", valid, tail=False)
    assert torch.equal(out[:rows], wanted[:rows])
    assert (out[rows:] == 7).all()
    assert (codes[rows:] == 0x55).all()


class Loopback:
    """A dispatch whose wire ends where it starts, with room for three times the rows."""

    experts = EXPERTS

    def __init__(self, expected):
        self.expected = expected

    def send(self, x, ids, weights, over):
        routing = route(ids, EXPERTS, capacity=3 * TOKENS * TOP_K, over=over)
        return Received(x, weights, ids, routing, self.expected)

    def collect(self, slots, received):
        return slots

    def grow_capacity(self, **_):
        return False


class Stack(nn.Module):
    def __init__(self, expected: int | None = None) -> None:
        super().__init__()
        config = MoEConfig(width=WIDTH, expert_width=INNER, experts=EXPERTS, top_k=TOP_K)
        dispatches = [None if expected is None else Loopback(expected) for _ in range(DEPTH)]
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "moe": MoE(config, dispatch=dispatch)})
            for dispatch in dispatches
        )

    def forward(self, x):
        total = torch.zeros((), device=x.device)
        for layer in self.layers:
            y, aux = layer["moe"](layer["norm"](x))
            x, total = x + y, total + aux
        return x.float().square().mean() + total


def train(home, *, graph, bits=8, steps=7, backend="auto", expected=None, **pool):
    gc.collect()
    torch.manual_seed(0)
    model = Stack(expected).to(device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    window = {"prefetch_bytes": 0} if home == "offload" else {}
    rules = [ps.Rule("layers.*.moe.experts", home, min_bytes=4096, bits=bits, **window)]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page="16KiB", **pool)), backend=backend).attach(model)

    def train_step(x):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer, graph=graph)
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        losses.append(step(torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)))
    step.wait()
    return torch.stack(losses), [p.detach().clone() for p in model.parameters()], keeper


@pytest.mark.parametrize("home", ["keep", "stash", "offload"])
def test_a_graph_trains_to_the_bits_of_eager_steps(one_order, home):
    eager, graphed = train(home, graph=False), train(home, graph=True)
    assert same(eager[:2], graphed[:2])
    exact = train(home, graph=True, bits=None)
    assert not same(exact[1], graphed[1])
    off = (exact[0] - graphed[0]).abs() / exact[0]
    assert off.max() < 0.02
    if home != "keep":
        coded, whole = (made[2].stats().homes[home].peak for made in (graphed, exact))
        assert coded < 0.7 * whole  # (rows of 256 values take 272 bytes, and indices are held as they are)


def test_all_homes_train_to_the_same_bits(one_order):
    kept = train("keep", graph=True)
    for home in ("stash", "offload"):
        assert same(kept[:2], train(home, graph=True)[:2])


@pytest.mark.parametrize("expected", [0, 700, 3 * TOKENS * TOP_K])
@pytest.mark.parametrize("home", ["keep", "stash", "offload"])
def test_received_rows_train_to_the_same_bits_wherever_their_codes_wait(one_order, home, expected):
    wanted = train("stash", graph=False, expected=expected)
    for graph in (False, True):
        assert same(train(home, graph=graph, expected=expected)[:2], wanted[:2])


def test_a_graph_whose_codes_find_no_pages_is_run_again(one_order):
    wanted = train("stash", graph=True, expected=200)
    short = train("stash", graph=True, expected=200, device="256KiB")
    assert same(wanted[:2], short[:2])


def test_codes_of_expected_rows_hold_half_the_bytes(one_order):
    peaks = []
    for bits in (None, 8):
        made = train("stash", graph=True, bits=bits, expected=TOKENS * TOP_K)
        stats = made[2].stats()
        peaks.append(stats.homes["keep"].peak + stats.homes["stash"].peak)
        del made
    # A row of 256 values takes 272 bytes instead of 512, and so does its first projection.
    assert peaks[0] - peaks[1] == DEPTH * TOKENS * TOP_K * 2 * (512 - 272)


@pytest.mark.parametrize("home", ["keep", "stash"])
@pytest.mark.parametrize("expected", [None, 700])
def test_no_step_waits_for_the_device(one_order, home, expected):
    """After the pool is made, coding asks the device for nothing. (The check of a pool at the end does.)"""
    torch.manual_seed(0)
    model = Stack(expected).to(device="cuda", dtype=torch.bfloat16)
    rule = ps.Rule("layers.*.moe.experts", home, min_bytes=4096, bits=8)
    keeper = ps.Keeper(ps.Policy([rule])).attach(model)
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        with keeper.step():
            model(x).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with keeper.step(check=home == "keep"):
            model(x).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
