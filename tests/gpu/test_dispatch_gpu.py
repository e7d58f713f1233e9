"""Dispatches over NCCL: one rank, which is all that one GPU allows; in a CUDA graph, without a host sync."""

import pytest
import torch
import torch.distributed as dist
from support import error

from pagestash.moe import AllGather, AllToAll, MoE, MoEConfig
from pagestash.pages.pool import PagePool

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
T, SHAPE = 512, {"width": 256, "expert_width": 192, "experts": 16, "top_k": 4}
STATIC = ["gather", "padded"]


@pytest.fixture(scope="module", autouse=True)
def nccl(tmp_path_factory):
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(kind, max_tokens=T, pair_capacity=None, pool=None, **changes):
    config = MoEConfig(**SHAPE | changes)
    dispatches = {
        "gather": lambda: AllGather(config, max_tokens=max_tokens),
        "padded": lambda: AllToAll(config, max_tokens=max_tokens, pair_capacity=pair_capacity),
        "exact": lambda: AllToAll(config, padded=False),
        "local": lambda: None,
    }
    torch.manual_seed(3)
    return MoE(config, dispatch=dispatches[kind](), pool=pool, dtype=torch.bfloat16, device=CUDA)


def batch(seed=0):
    torch.manual_seed(seed)
    return torch.randn(T, 256, device=CUDA).bfloat16(), torch.randn(T, 256, device=CUDA).bfloat16()


def gradients(moe, x, dy):
    for p in moe.parameters():
        p.grad = None
    x = x.detach().requires_grad_()
    y, _ = moe(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in moe.parameters())]


def capture(moe, x, dy):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            gradients(moe, x, dy)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = gradients(moe, x, dy)
    return graph, held


@pytest.mark.parametrize("kind", [*STATIC, "exact"])
def test_one_rank_gives_the_local_layer(kind):
    """To the last bit where tokens travel; where choices do, each weighted row is rounded before the sum."""
    x, dy = batch()
    for one, two in zip(gradients(make(kind), x, dy), gradients(make("local"), x, dy)):
        assert torch.equal(one, two) if kind == "gather" else error(one, two) < 1e-2


@pytest.mark.parametrize("kind", STATIC)
def test_padding_for_ranks_with_more_tokens_changes_nothing_but_rounding(kind):
    x, dy = batch()
    for one, two in zip(gradients(make(kind, 3 * T), x, dy), gradients(make("local"), x, dy)):
        assert error(one, two) < 1e-2


@pytest.mark.parametrize("pages", [None, 200, 20])
@pytest.mark.parametrize("kind", STATIC)
def test_forward_and_backward_in_a_cuda_graph_without_a_sync(kind, pages):
    pool = None if pages is None else PagePool(CUDA, device_pages=pages)
    # Capacities below the worst case, so that what is wanted is counted too.
    moe = make(kind, pair_capacity=T * 4 - 1 if kind == "padded" else None, pool=pool, capacity=T * 4)
    x, dy = batch()
    if kind == "padded":
        gradients(moe, x, dy)
        assert moe.over_capacity == 1
        assert moe.grow_capacity(headroom=1.0, alignment=1)
        moe.clear_over_capacity()
    graph, held = capture(moe, x, dy)
    eager = make(kind)
    for seed in (1, 2):
        for buffer, value in zip((x, dy), batch(seed)):
            buffer.copy_(value)
        graph.replay()
        for one, two in zip([value.clone() for value in held], gradients(eager, x, dy)):
            assert torch.equal(one, two)
    assert moe.over_capacity == 0
    if pool is not None:
        stats = pool.stats()
        assert not stats.overflow
        assert stats.device.in_use == 0
        # The received rows alone are T·K·d·2 bytes, 16 pages; both with the first projection 40.
        assert (stats.given_up_groups > 0) == (pages == 20)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(moe, x, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", STATIC)
def test_a_replay_beyond_capacity_raises_the_flag_and_a_grown_graph_is_right(kind):
    moe = make(kind, capacity=T)
    x, dy = batch()
    graph, _ = capture(moe, x, dy)
    moe.clear_over_capacity()
    graph.replay()
    assert moe.over_capacity == 1
    assert moe.grow_capacity()
    assert moe.experts.capacity == T * 4  # the worst case is what was wanted
    moe.clear_over_capacity()
    graph, held = capture(moe, x, dy)
    graph.replay()
    assert moe.over_capacity == 0
    for one, two in zip(held, gradients(make(kind), x, dy)):
        assert torch.equal(one, two)
