"""The seam for grouped products: who is chosen, and that a block on another backend is the same block."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from support.compare import error, same
from support.tiers import slow
from torch import nn

import pagestash as ps
from pagestash.kernels.gemm import products
from pagestash.kernels.gemm.products import TORCH, described, products_for
from pagestash.kernels.gemm.tiles import Tile, tile_for
from pagestash.moe import MoE, MoEConfig
from pagestash.policy import PoolConfig

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gemm_sweep.json"


class StandIn:
    """A backend that gathers and gates, by torch: its first projection has gate and linear part in pairs."""

    name = "stand-in"

    def __init__(self):
        self.calls = defaultdict(int)

    def gates(self, rows, up):
        return True

    def up_gated(self, x, up, bounds):
        self.calls["up_gated"] += 1
        gate, linear = TORCH.forward(x, up, bounds).chunk(2, dim=1)
        # As a kernel that gates what it has not rounded: other bits than from `h`.
        tokens = x.tokens_TD.double()[x.token_R.clamp(0, x.tokens_TD.shape[0] - 1)]
        exact_gate, exact_linear = TORCH.forward(tokens, up.double(), bounds).chunk(2, dim=1)
        a = nn.functional.silu(exact_gate) * exact_linear
        return _woven(gate, linear), a.to(gate.dtype)

    def forward(self, rows, weight, bounds):
        return TORCH.forward(rows, weight, bounds)

    def input_gradient(self, dy, weight, bounds, *, paired=False):
        self.calls["paired"] += paired
        return TORCH.input_gradient(_plain(dy) if paired else dy, weight, bounds)

    def weight_gradient(self, dy, x, bounds, *, paired=False, turned=False):
        return TORCH.weight_gradient(_plain(dy) if paired else dy, x, bounds, turned=turned)


def _woven(gate, linear):
    return torch.stack([gate, linear], 2).flatten(1)


def _plain(h):
    return torch.cat([h[:, 0::2], h[:, 1::2]], 1)


@pytest.fixture
def stand_in(monkeypatch):
    found = StandIn()
    monkeypatch.setattr("pagestash.moe.projection.products_for", lambda like, *sides: found)
    return found


def step(moe, x, policy=None):
    moe.zero_grad()
    leaf = x.clone().requires_grad_()
    keeper = ps.Keeper(policy or ps.Policy()).attach(moe)
    for _ in range(2):  # the first step measures the pool
        moe.zero_grad()
        leaf.grad = None
        with keeper.step():
            y, aux = moe(leaf)
            (y.square().sum() + aux).backward()
    keeper.detach()
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in moe.parameters())]


def layer(**changes):
    torch.manual_seed(0)
    return MoE(MoEConfig(**{"width": 32, "expert_width": 16, "experts": 6, "top_k": 2} | changes))


def test_a_layer_is_the_same_by_another_backend(stand_in, monkeypatch):
    moe, x = layer(), torch.randn(40, 32)
    got = step(moe, x)
    assert stand_in.calls == {"up_gated": 2, "paired": 2}
    monkeypatch.undo()
    for one, two in zip(got, step(moe, x), strict=True):
        assert error(one, two) < 1e-5


@pytest.mark.parametrize("home", ["stash", "offload", "recompute"])
@pytest.mark.parametrize("room", ["auto", *slow("4KiB")])
def test_bits_do_not_depend_on_a_policy(stand_in, home, room):
    """Nor on whether its pool has room."""
    moe, x = layer(), torch.randn(40, 32)
    kept = step(moe, x)
    pool = PoolConfig(page="1KiB", device=room)
    policy = ps.Policy(rules=[ps.Rule("moe_act", home)], pool=pool)
    for one, two in zip(kept, step(moe, x, policy), strict=True):
        assert same(one, two)
    assert stand_in.calls["up_gated"] >= 4  # and once more wherever it recomputes


@pytest.mark.parametrize(
    "changes", [{"activation": "gelu"}, {"bias": True}, {"activation": "clamped"}], ids=str
)
def test_what_no_epilogue_computes_goes_by_plain_products(stand_in, changes):
    step(layer(**changes), torch.randn(8, 32))
    assert stand_in.calls["up_gated"] == 0


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(products, "_why_not_quack", products._why_not_quack.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return monkeypatch


HOPPER = torch.device("cuda", 0)


def test_who_multiplies_says_why(fresh):
    assert described(torch.device("cpu")) == "torch (quack needs a GPU, not cpu)"
    assert described(HOPPER, torch.float32) == "torch (quack multiplies bf16 here, not float32)"
    fresh.setattr(products, "find_spec", lambda name: None)
    assert "pip install 'pagestash[quack]'" in described(HOPPER)
    fresh.setattr(products, "find_spec", lambda name: object())
    fresh.setattr(products, "_quack_version", lambda: "1.2")
    assert described(HOPPER) == "quack 1.2"
    fresh.setenv("PAGESTASH_GEMM", "torch")
    assert described(HOPPER) == "torch (PAGESTASH_GEMM=torch)"
    fresh.delenv("PAGESTASH_GEMM")
    fresh.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert described(HOPPER) == "torch (tiles for quack are known for sm90, not sm100)"
    fresh.setenv("PAGESTASH_GEMM", "quack")
    with pytest.raises(ValueError, match="PAGESTASH_GEMM=quack: tiles for quack"):
        described(HOPPER)
    fresh.setenv("PAGESTASH_GEMM", "cublas")
    with pytest.raises(ValueError, match="expected 'torch', 'quack' or nothing"):
        described(HOPPER)


def test_the_shape_and_the_dtype_choose(fresh):
    quack = object()
    fresh.setattr(products, "_quack", lambda: quack)
    fresh.setattr(products, "find_spec", lambda name: object())

    class Like:
        device, dtype = HOPPER, torch.bfloat16

    assert products_for(Like, 2048, 1536) is quack
    assert products_for(Like, 2048, 1532) is TORCH  # rows that TMA cannot read
    Like.dtype = torch.float16
    assert products_for(Like, 2048, 1536) is TORCH


def sweep():
    found = json.loads(RESULTS.read_text())["rows"]
    return [pytest.param(row, id=f"{row['shape']}, {row['product']}") for row in found]


@pytest.mark.parametrize("row", sweep())
def test_the_tiles_chosen_are_the_best_of_the_sweep(row):
    rows, experts, width, inner = row["tokens"] * row["top_k"], row["experts"], row["width"], row["inner"]
    up, down = (2 * inner, width), (width, inner)
    sides = {"up_gated": up, "gradient": up, "gathered_weights": up}.get(row["product"], down)
    chosen = tile_for(row["product"], rows, experts, *sides)
    if chosen is None:
        return
    times = {Tile(*(each[field] for field in Tile._fields)): each["ms"] for each in row["ms"]}
    assert times[chosen] <= 1.05 * min(times.values())
    assert times[chosen] <= 1.02 * row["torch_ms"]
