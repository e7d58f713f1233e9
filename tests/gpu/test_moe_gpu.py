"""The MoE kernels and layer on a GPU: against the references, in a CUDA graph, and past 2**31 elements."""

import pytest
import torch
import torch.nn.functional as F
from support import error
from support.activations import VARIANTS

from pagestash.kernels.gemm.grouped import grouped_mm, grouped_mm_reference
from pagestash.kernels.loss.cross_entropy import LossOptions, linear_cross_entropy, softmax_loss_
from pagestash.kernels.loss.scale import scaled
from pagestash.kernels.moe import combine as C
from pagestash.kernels.moe import gated as S
from pagestash.kernels.moe import permute as P
from pagestash.kernels.moe import route as R
from pagestash.kernels.moe.accumulate import accumulate_, accumulate_reference
from pagestash.kernels.moe.activation import ACTIVATIONS
from pagestash.kernels.moe.choose_experts import topk
from pagestash.kernels.pages.paged import Pages
from pagestash.moe import MoE, MoEConfig
from pagestash.moe import ops as moe_ops
from pagestash.moe.projection import Weight
from pagestash.moe.received import received_experts
from pagestash.moe.saving import BlockOptions, Saving
from pagestash.pages.pool import PagePool

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(8192, 8, 128), (1000, 4, 256), (77, 1, 3)])
def test_routing_is_the_references_to_the_last_bit(tokens, choices, experts):
    scores = torch.randn(tokens, experts, device=CUDA).round(decimals=1)  # with ties
    ids = topk(scores, choices)
    assert torch.equal(ids, topk(scores, choices, backend="torch"))
    for capacity in (tokens * choices, tokens * choices // 2):
        over = torch.zeros((), device=CUDA)
        got = R.route(ids, experts, capacity=capacity, over=over)
        wanted = R.route(ids, experts, capacity=capacity, backend="torch")
        count = int(wanted.rows)
        assert torch.equal(got.counts, wanted.counts)
        assert torch.equal(got.offsets, wanted.offsets)
        assert torch.equal(got.inverse, wanted.inverse)
        assert torch.equal(got.order[:count], wanted.order[:count])
        assert float(over) == (capacity < tokens * choices)


@pytest.mark.parametrize("width", [2048, 7168, 2880, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_move_and_add_up_exactly(width, dtype):
    ids = torch.rand(700, 16, device=CUDA).argsort(1)[:, :8].int()
    found = R.route(ids, 16, capacity=5000)
    x = torch.randn(700, width, device=CUDA).to(dtype)
    rows = P.permute(x, found.inverse, 5600)
    assert torch.equal(rows[:5000], x[found.order.long() // 8])
    rows[5000:] = torch.nan
    assert torch.equal(C.combine(rows, found.inverse), C.combine(rows, found.inverse, backend="torch"))
    weights = torch.rand(700, 8, device=CUDA)
    got, wanted = (C.combine(rows, found.inverse, weights, backend=b) for b in ("triton", "torch"))
    assert error(got, wanted) < (4e-3 if dtype == torch.bfloat16 else 1e-6)
    got = C.weight_gradient(rows, found.inverse, x)
    assert error(got, C.weight_gradient(rows, found.inverse, x, backend="torch")) < 1e-5


PAGES = (None, 1024, 65536, 65536 + 16)
WIDE, ODD, NARROW = (768, torch.bfloat16), (1408, torch.bfloat16), (100, torch.float32)
BY_NAME = [
    (name, False, *size, page) for name in ACTIVATIONS for size in (WIDE, ODD, NARROW) for page in PAGES
]
"""Activation, interleaved, an expert's width, dtype, bytes of a page."""
OTHERS = [
    (name, interleaved, *size, page)
    for name, activation in VARIANTS.items()
    for interleaved in (False, True)
    if (interleaved and activation.gated) or (not interleaved and name not in ACTIVATIONS)
    for size, page in ((WIDE, None), (ODD, 65536), (NARROW, None))
]


@pytest.mark.parametrize(("activation", "interleaved", "n", "dtype", "page_bytes"), [*BY_NAME, *OTHERS])
def test_the_activation_is_that_of_float64(activation, interleaved, n, dtype, page_bytes):
    activation = VARIANTS[activation]
    capacity, count, experts = 1000, 777, 9
    width = activation.parts * n
    h = (3 * torch.randn(capacity, width, device=CUDA)).to(dtype)
    gradient = torch.randn(capacity, n, device=CUDA).to(dtype)
    h[count:] = gradient[count:] = torch.nan
    order = torch.randperm(capacity, device=CUDA, dtype=torch.int32)
    weights = torch.rand(capacity, device=CUDA)
    offsets = torch.linspace(100, count, experts, device=CUDA).int()
    bias = torch.randn(experts, width, device=CUDA).to(dtype) if n != 768 else None
    info = S.RowInfo(offsets[-1:], weights, order, bias, offsets, interleaved)
    wide_bias = bias.double() if bias is not None else None
    wide = S.RowInfo(offsets[-1:], weights.double(), order, wide_bias, offsets, interleaved)
    a_true = S.forward(h.double(), wide, activation, backend="torch")
    true = S.backward(h.double(), gradient.double(), wide, activation, backend="torch")
    pages = None
    if page_bytes:
        needed = -(-count * width * h.element_size() // page_bytes)
        pool = PagePool(CUDA, page_bytes, needed - 3, 3)
        [ticket] = pool.stash([torch.zeros_like(h)], rows=offsets[-1:])
        pages = Pages(pool.memory, ticket.span, ticket.member, ticket.group.book)
    a = S.forward(h, info, activation, pages)
    most = 3e-3 if dtype == torch.bfloat16 else 1e-6
    assert error(a[:count], a_true[:count]) < most
    buffer = h.clone()
    if pages is not None:
        assert torch.equal(pool.restore([ticket])[0][:count], h[:count])
        buffer.fill_(torch.nan)
    dh, again, dweights = S.backward(buffer, gradient.clone(), info, activation, pages, in_place=True)
    assert error(dh[:count], true[0][:count]) < most
    assert torch.equal(again[:count], a[:count])
    assert error(dweights, true[2]) < 1e-5


@pytest.mark.parametrize("vocabulary", [1000, 50257, 151936])
def test_the_fused_head_is_that_of_float64(vocabulary):
    hidden = torch.randn(300, 64, device=CUDA)
    weight = torch.randn(vocabulary, 64, device=CUDA) / 8
    labels = torch.randint(0, vocabulary, (300,), device=CUDA)
    labels[:20] = -100
    options = LossOptions(label_smoothing=0.1, z_loss=1e-3, chunk=128)
    wanted = linear_cross_entropy(hidden.double(), weight.double(), labels, options, backend="torch")
    for dtype, most in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        got = linear_cross_entropy(hidden.to(dtype), weight.to(dtype), labels, options)
        for one, two in zip(got, wanted):
            assert error(one, two) < most


def test_grouped_products_take_empty_experts_and_garbage_tails():
    ends = torch.tensor([0, 0, 100, 100, 357, 400, 400], device=CUDA, dtype=torch.int32)
    a, b = torch.randn(512, 64, device=CUDA).bfloat16(), torch.randn(6, 64, 48, device=CUDA).bfloat16()
    c = torch.randn(512, 48, device=CUDA).bfloat16()
    a[400:] = c[400:] = torch.nan
    assert error(grouped_mm(a, b, ends)[:400], grouped_mm_reference(a, b, ends)[:400]) < 1e-2
    got, wanted = grouped_mm(a.t(), c, ends), grouped_mm_reference(a.t(), c, ends)
    assert not got[[0, 2, 5]].any()
    assert error(got, wanted) < 1e-2


@pytest.mark.parametrize("ends", [[0, 0, 0], [0, 300, 300], [77, 78, 500]])
@pytest.mark.parametrize(("m", "n"), [(512, 384), (200, 136), (201, 136)])  # the last: not by TMA
def test_products_are_added_to_matrices(ends, m, n):
    a, b = (torch.randn(600, size, device=CUDA).bfloat16() for size in (m, n))
    a[ends[-1] :] = b[ends[-1] :] = torch.nan
    out = torch.randn(3, m, n, device=CUDA).bfloat16()
    wanted, offsets = out.double(), torch.tensor(ends, device=CUDA, dtype=torch.int32)
    accumulate_reference(wanted, a.double(), b.double(), offsets)
    assert error(accumulate_(out, a, b, offsets), wanted) < 3e-3
    empty = [expert for expert, (start, end) in enumerate(zip([0, *ends], ends)) if start == end]
    assert error(out[empty], wanted[empty]) == 0 if empty else True


@pytest.mark.parametrize("expected", [0, 2000, 10000])
def test_received_rows_in_a_graph_with_any_pool(expected):
    """Rows beyond the expected ones in pages, kept, or recomputed: the same bits, whatever arrives."""
    torch.manual_seed(0)
    slots, choices, experts, capacity = 1000, 4, 8, 8000
    up = (torch.randn(experts, 384, 256, device=CUDA) / 16).bfloat16().requires_grad_()
    down = (torch.randn(experts, 256, 192, device=CUDA) / 14).bfloat16().requires_grad_()
    x, dy = (torch.randn(slots, 256, device=CUDA).bfloat16() for _ in range(2))
    weights = torch.rand(slots, choices, device=CUDA)
    ids = torch.zeros(slots, choices, dtype=torch.int32, device=CUDA)

    def step(pool):
        up.grad = down.grad = None
        leaf, scale = x.clone().requires_grad_(), weights.clone().requires_grad_()
        routing = R.route(ids, experts, capacity=capacity)
        options = BlockOptions(x=Saving(pool=pool), h=Saving(pool=pool))
        given = (leaf, scale, Weight(up), Weight(down), ids, routing, options)
        y = leaf + received_experts(*given, expected_rows=expected)
        y.backward(dy)
        return [y.detach(), leaf.grad, scale.grad, up.grad, down.grad]

    pools = [None, PagePool(CUDA, device_pages=100), PagePool(CUDA, device_pages=34)]
    graphs = []
    for pool in pools:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step(pool)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graphs.append((graph, step(pool)))
    for share in (0.3, 0.6, 1.0):
        # -1 stands for experts elsewhere.
        drawn = torch.rand(slots, experts, device=CUDA).argsort(1)[:, :choices].int()
        ids.copy_(torch.where(torch.rand(slots, choices, device=CUDA) < share, drawn, -1))
        results = []
        for graph, held in graphs:
            graph.replay()
            results.append([value.clone() for value in held])
        for other in results[1:]:
            for one, two in zip(results[0], other):
                assert torch.equal(one, two)
        for one, two in zip(results[0], plain_received(x, weights, ids, up, down, dy)):
            assert error(one, two) < 2e-2
    for pool in pools[1:]:
        assert not pool.overflow
        assert pool.stats().device.in_use == 0


def plain_received(x, weights, ids, up, down, dy):
    """The same, as one writes it without any of this."""
    x, weights, up, down = (t.detach().double().requires_grad_() for t in (x, weights, up, down))
    y = x
    for expert in range(up.shape[0]):
        gate, linear = (x @ up[expert].t()).chunk(2, dim=1)
        scale = torch.where(ids == expert, weights, 0.0).sum(1, keepdim=True)
        y = y + scale * (F.silu(gate) * linear) @ down[expert].t()
    return [y.detach(), *torch.autograd.grad(y, [x, weights, up, down], dy.double())]


SHAPE = {"width": 256, "expert_width": 192, "experts": 16, "top_k": 4}


def gradients(moe, x, dy):
    for p in moe.parameters():
        p.grad = None
    x = x.clone().requires_grad_()
    y, aux = moe(x)
    torch.autograd.backward([y, aux], [dy, torch.ones_like(aux)] if aux.requires_grad else [dy, None])
    return [y.detach(), x.grad, *(p.grad for p in moe.parameters())]


@pytest.mark.parametrize("changes", [
    {},
    {"activation": "clamped", "bias": True},
    {"score": "sigmoid", "correction_bias": True, "groups": 4, "group_limit": 2, "shared_experts": 1},
])  # fmt: skip
def test_the_layer_is_that_of_the_cpu(changes):
    torch.manual_seed(0)
    here = MoE(MoEConfig(**SHAPE, **changes), dtype=torch.bfloat16)
    if here.config.bias:
        here.expert_fc1.bias.data.normal_()
        here.expert_fc2.bias.data.normal_()
    there = MoE(MoEConfig(**SHAPE, **changes), dtype=torch.bfloat16, device=CUDA)
    there.load_state_dict(here.state_dict())
    x, dy = torch.randn(500, 256).bfloat16(), torch.randn(500, 256).bfloat16()
    there_all = gradients(there, x.cuda(), dy.cuda())
    wide = MoE(MoEConfig(**SHAPE, **changes))
    wide.load_state_dict({k: v.float() for k, v in here.state_dict().items()})
    for one, two in zip(there_all, gradients(wide, x.float(), dy.float())):
        assert error(one.cpu(), two) < 2e-2


def test_gradients_are_the_same_bits_every_time_and_with_any_pool():
    moe = MoE(MoEConfig(**SHAPE), dtype=torch.bfloat16, device=CUDA)
    x, dy = (torch.randn(1000, 256, device=CUDA).bfloat16() for _ in range(2))
    wanted = gradients(moe, x, dy)
    needed = 4000 * 384 * 2 // 65536 + 1
    for pages in (None, needed, needed - 1, 1):
        moe.experts.pool = None if pages is None else PagePool(CUDA, device_pages=pages)
        for one, two in zip(gradients(moe, x, dy), wanted):
            assert torch.equal(one, two)
        if pages is not None:
            stats = moe.experts.pool.stats()
            assert not stats.overflow
            assert stats.device.in_use == 0


def test_the_layer_runs_in_a_cuda_graph_without_a_sync():
    config = MoEConfig(**SHAPE, score="sigmoid", correction_bias=True, balance_loss=0.01, shared_experts=1)
    moe = MoE(config, dtype=torch.bfloat16, device=CUDA, pool=PagePool(CUDA, device_pages=100))
    x, dy = (torch.randn(512, 256, device=CUDA).bfloat16() for _ in range(2))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            gradients(moe, x, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = gradients(moe, x, dy)
    for _ in range(3):
        x.copy_(torch.randn(512, 256))
        graph.replay()
        got = [value.clone() for value in held]
        for one, two in zip(got, gradients(moe, x, dy)):
            assert torch.equal(one, two)
    assert moe.experts.pool.stats().device.in_use == 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(moe, x, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_times_width_past_two_to_the_31():
    rows, width = 1_100_000, 2048  # 2.25e9 elements, 4.5 GB
    inverse = torch.arange(rows, device=CUDA, dtype=torch.int32).view(-1, 1).flip(0).contiguous()
    x = torch.randn(rows, width, device=CUDA, dtype=torch.bfloat16)
    out = P.permute(x, inverse, rows)
    for t in (0, 5, rows // 2, rows - 1):
        assert torch.equal(out[rows - 1 - t], x[t])
    back = C.combine(out, inverse)
    assert torch.equal(back[-1000:], x[-1000:])
    assert torch.equal(back[:1000], x[:1000])
    del back, out
    info = S.RowInfo(torch.tensor([rows], device=CUDA, dtype=torch.int32))
    a = S.forward(x, info)
    last = x[-64:].float()
    assert error(a[-64:], F.silu(last[:, :1024]) * last[:, 1024:]) < 4e-3
    dh, _, _ = S.backward(x, a, info)
    tail = S.backward(x[-64:].contiguous(), a[-64:].contiguous(), S.RowInfo(info.rows * 0 + 64))[0]
    assert torch.equal(dh[-64:], tail)
    del dh, a, x
    logits = torch.randn(16000, 151936, device=CUDA, dtype=torch.bfloat16)  # 2.4e9
    labels = torch.randint(0, 151936, (16000,), device=CUDA)
    wanted = F.cross_entropy(logits[-8:].float(), labels[-8:], reduction="none")
    losses = torch.empty(16000, device=CUDA)
    softmax_loss_(logits, labels, losses, torch.ones((), device=CUDA), LossOptions())
    assert error(losses[-8:], wanted) < 1e-5


def test_a_layer_is_one_graph_with_the_same_bits():
    moe = MoE(MoEConfig(width=128, expert_width=64, experts=8, top_k=2, shared_experts=1), device=CUDA)
    moe = moe.bfloat16()
    x = torch.randn(64, 128, device=CUDA).bfloat16().requires_grad_()
    results = []
    for function in (moe, torch.compile(moe, fullgraph=True, backend="aot_eager")):
        y, _ = function(x)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *moe.parameters()])])
    for one, two in zip(*results):
        assert torch.equal(one, two)


def test_the_head_needs_the_sum_of_its_gradient_and_as_much_as_its_weight():
    tokens, width, vocabulary = 2048, 2048, 100_352  # backward has the peak
    hidden = torch.randn(tokens, width, device=CUDA).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, device=CUDA) / 20).bfloat16().requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=CUDA)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    moe_ops.cross_entropy(hidden, weight, labels).backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    moe_ops.cross_entropy(hidden, weight, labels).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 1.05 * (2 * weight.nbytes + max(weight.nbytes, 256 << 20)) + 3 * hidden.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_scaled_and_rounded_once(dtype):
    values, by = torch.randn(1_000_003, device=CUDA), torch.tensor(1 / 3, device=CUDA)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = scaled(values, by, dtype)
    assert torch.cuda.max_memory_allocated() - before <= got.nbytes + 512
    assert torch.equal(got, (values * by).to(dtype))


def test_the_weights_gradient_is_not_rounded_from_chunk_to_chunk():
    hidden = torch.randn(512, 64, device=CUDA).bfloat16()
    weight = (torch.randn(1000, 64, device=CUDA) / 8).bfloat16()
    labels = torch.randint(0, 1000, (512,), device=CUDA)
    whole, parts = (
        linear_cross_entropy(hidden, weight, labels, LossOptions(chunk=chunk))[2] for chunk in (512, 16)
    )
    assert error(parts, whole) < 1e-4  # a few logits are rounded otherwise
