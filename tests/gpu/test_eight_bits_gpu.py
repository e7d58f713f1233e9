"""`bits=8` on a GPU: the kernels agree with torch bit for bit, in every home, and in a CUDA graph."""

import gc

import pytest
import torch
from support import same
from torch import nn

import pagestash as ps
from pagestash.kernels.pages import eight_bits
from pagestash.kernels.pages.eight_bits import BLOCK, FLOOR, CodeShape, decode, encode
from pagestash.moe import MoE, MoEConfig
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


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = MoEConfig(width=WIDTH, expert_width=INNER, experts=EXPERTS, top_k=TOP_K)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "moe": MoE(config)}) for _ in range(DEPTH)
        )

    def forward(self, x):
        total = torch.zeros((), device=x.device)
        for layer in self.layers:
            y, aux = layer["moe"](layer["norm"](x))
            x, total = x + y, total + aux
        return x.float().square().mean() + total


def train(home, *, graph, bits=8, steps=7, backend="auto"):
    gc.collect()
    torch.manual_seed(0)
    model = Stack().to(device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    window = {"prefetch_bytes": 0} if home == "offload" else {}
    rules = [ps.Rule("layers.*.moe.experts", home, min_bytes=4096, bits=bits, **window)]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page="16KiB")), backend=backend).attach(model)

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


def test_no_step_waits_for_the_device(one_order):
    """After the pool is made, coding asks the device for nothing."""
    torch.manual_seed(0)
    model = Stack().to(device="cuda", dtype=torch.bfloat16)
    rule = ps.Rule("layers.*.moe.experts", "keep", min_bytes=4096, bits=8)
    keeper = ps.Keeper(ps.Policy([rule])).attach(model)
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        with keeper.step():
            model(x).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with keeper.step():
            model(x).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
