"""quack's products on a GPU: against torch's, over garbage, in a graph, and under policies."""

import pytest
import torch
from support import error
from support.uninitialised import filled_with_nan

import pagestash as ps
from pagestash.kernels.gemm import products
from pagestash.kernels.gemm.products import TORCH
from pagestash.kernels.gemm.rows import TokenRows
from pagestash.kernels.moe.route import route
from pagestash.moe import MoE, MoEConfig
from pagestash.policy import PoolConfig

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def quack():
    pytest.importorskip("quack")
    found = products.products_for(torch.empty(1, device=CUDA, dtype=torch.bfloat16), 64, 64)
    if found is TORCH:
        pytest.skip(products.described(CUDA))
    return found


def normal(*shape):
    return torch.randn(shape, device=CUDA).bfloat16()


def drawn(tokens, experts, choices, seed=0):
    """Ids with experts that nobody chose, and choices that are no expert's."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    ids = torch.rand(tokens, experts, device=CUDA, generator=generator).argsort(1)[:, :choices].int()
    ids[torch.rand(tokens, choices, device=CUDA, generator=generator) < 0.2] = -1
    return torch.where((ids == 0) | (ids == experts - 1), -1, ids)


@pytest.mark.parametrize(
    ("tokens", "width", "inner", "experts", "choices"),
    [
        (0, 64, 32, 4, 2),
        (3, 64, 32, 1, 1),
        (1000, 256, 192, 8, 4),
        (700, 2880, 1440, 5, 2),
        (900, 7168, 512, 4, 2),
    ],
)
def test_products_are_torchs(quack, tokens, width, inner, experts, choices):
    torch.manual_seed(0)
    ids = drawn(tokens, experts, choices) if experts > 2 else torch.zeros(tokens, choices, device=CUDA).int()
    routing = route(ids, experts)
    bounds, count = routing.bounds, int(routing.rows)
    rows = ids.numel()
    up, down = normal(experts, 2 * inner, width) / 16, normal(experts, width, inner) / 16
    x_T, a_R, h_R, x_R = (
        normal(tokens, width),
        normal(rows, inner),
        normal(rows, 2 * inner),
        normal(rows, width),
    )
    for garbage in (a_R, h_R, x_R):
        garbage[count:] = torch.nan
    x = TokenRows(x_T, routing.inverse, routing.order)
    plain = torch.cat([h_R[:, 0::2], h_R[:, 1::2]], 1)
    pairs = [
        (quack.forward(a_R, down, bounds), TORCH.forward(a_R, down, bounds)),
        (quack.forward(x, up, bounds), TORCH.forward(x, up, bounds)),
        (quack.input_gradient(x, down, bounds), TORCH.input_gradient(x, down, bounds)),
        (quack.input_gradient(h_R, up, bounds), TORCH.input_gradient(h_R, up, bounds)),
        (quack.input_gradient(h_R, up, bounds, paired=True), TORCH.input_gradient(plain, up, bounds)),
    ]
    turned = normal(experts, width, 2 * inner).mT / 16
    pairs.append((quack.forward(x, turned, bounds), TORCH.forward(x, turned, bounds)))
    pairs = [(got[:count], wanted[:count]) for got, wanted in pairs]
    weights = [
        (quack.weight_gradient(x_R, a_R, bounds), TORCH.weight_gradient(x_R, a_R, bounds)),
        (quack.weight_gradient(x, a_R, bounds), TORCH.weight_gradient(x, a_R, bounds)),
        (quack.weight_gradient(h_R, x, bounds), TORCH.weight_gradient(h_R, x, bounds)),
        (quack.weight_gradient(h_R, x, bounds, paired=True), TORCH.weight_gradient(plain, x, bounds)),
        (quack.weight_gradient(h_R, x, bounds, turned=True), TORCH.weight_gradient(h_R, x, bounds)),
    ]
    if quack.gates(x.shape[0], up):
        both = quack.up_gated(x, up, bounds)
        h = TORCH.forward(x, up, bounds)[:count]
        gate, linear = h.float().chunk(2, 1)
        got_h, got_a = (each[:count] for each in both)
        pairs += [
            (torch.cat([got_h[:, 0::2], got_h[:, 1::2]], 1), h),
            (got_a, torch.nn.functional.silu(gate) * linear),
        ]
    for got, wanted in pairs + weights:
        assert got.shape == wanted.shape
        assert not got.numel() or not wanted.any() or error(got, wanted) < 1e-2
    if rows:
        empty = routing.counts == 0
        for got, _ in weights:
            assert not got[empty].any()


def layer(**changes):
    torch.manual_seed(0)
    config = MoEConfig(**{"width": 256, "expert_width": 192, "experts": 8, "top_k": 4} | changes)
    return MoE(config, device=CUDA, dtype=torch.bfloat16)


def passes(moe, x, policy=None):
    keeper = ps.Keeper(policy or ps.Policy()).attach(moe)
    for _ in range(3):
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        with keeper.step():
            y, _ = moe(leaf)
            y.float().square().sum().backward()
    keeper.detach()
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in moe.parameters())]


@pytest.mark.parametrize(
    "changes", [{}, {"activation": "clamped", "bias": True}, {"shared_experts": 1}], ids=str
)
@pytest.mark.parametrize("home", ["stash", "offload", "recompute"])
@pytest.mark.parametrize("room", ["auto", "128KiB"])
def test_bits_do_not_depend_on_a_policy(changes, home, room):
    moe, x = layer(**changes), normal(999, 256)
    policy = ps.Policy(rules=[ps.Rule("moe_act", home)], pool=PoolConfig(device=room))
    for one, two in zip(passes(moe, x), passes(moe, x, policy), strict=True):
        assert torch.equal(one, two)


def test_a_layer_reads_nothing_that_was_not_written():
    moe, x = layer(), normal(999, 256)
    wanted = passes(moe, x)
    with filled_with_nan():
        got = passes(moe, x)
    for one, two in zip(wanted, got, strict=True):
        assert torch.equal(one, two)


def test_a_layer_is_torchs_within_bf16(monkeypatch):
    moe, x = layer(), normal(4096, 256)
    got = passes(moe, x)
    monkeypatch.setattr("pagestash.moe.projection.products_for", lambda *_: TORCH)
    for one, two in zip(got, passes(moe, x), strict=True):
        assert error(one, two) < 2e-2


def test_a_graph_replays_for_any_routing():
    moe, x = layer(), normal(512, 256)
    moe.requires_grad_(True)

    def once():
        moe.zero_grad(set_to_none=True)
        leaf = x.detach().requires_grad_()
        y, _ = moe(leaf)
        y.backward(torch.ones_like(y))
        return [y, leaf.grad, *(p.grad for p in moe.parameters())]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = once()
    for _ in range(2):
        x.copy_(normal(512, 256))
        graph.replay()
        replayed = [each.clone() for each in held]
        for one, two in zip(replayed, once(), strict=True):
            assert torch.equal(one, two)
