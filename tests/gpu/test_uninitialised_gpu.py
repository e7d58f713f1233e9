"""Nothing on a GPU reads memory that was not written: every `torch.empty` is NaN here."""

import pytest
import torch
import torch.distributed as dist
from support.uninitialised import filled_with_nan

from pagestash.kernels.loss.cross_entropy import LossOptions, linear_cross_entropy
from pagestash.moe import AllGather, AllToAll, MoE, MoEConfig
from pagestash.pages.pool import PagePool

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CONFIG = MoEConfig(width=256, expert_width=192, experts=16, top_k=4, bias=True)
TOKENS, ROOM = 300, 512


@pytest.fixture(autouse=True, scope="module")
def uninitialised_is_nan():
    with filled_with_nan():
        yield


@pytest.fixture(scope="module")
def nccl(tmp_path_factory):
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_mode_fills_memory_of_the_device():
    like = torch.zeros(3, device=CUDA)
    for made in (torch.empty(3, device=CUDA), torch.empty_like(like), like.new_empty(3)):
        assert made.isnan().all()
    assert torch.empty_strided((2, 2), (2, 1), device=CUDA).isnan().all()


def gradients(moe, x, weights, ids, dy):
    moe.zero_grad()
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = moe.experts(x, weights, ids)
    y.backward(dy)
    experts = {name: p.grad for name, p in moe.named_parameters() if name.startswith("expert_")}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad} | experts


@pytest.mark.parametrize("stashed", [False, True], ids=["kept", "stashed"])
@pytest.mark.parametrize("kind", ["local", "gather", "padded", "exact"])
@pytest.mark.usefixtures("nccl")
def test_rows_and_slots_that_no_choice_has_reach_no_gradient(kind, stashed):
    """A third of the choices is nobody's, and the wire has room for more tokens than come."""
    make = {
        "local": lambda: None,
        "gather": lambda: AllGather(CONFIG, max_tokens=ROOM),
        "padded": lambda: AllToAll(CONFIG, max_tokens=ROOM),
        "exact": lambda: AllToAll(CONFIG, padded=False),
    }
    torch.manual_seed(0)
    wide = MoE(CONFIG, device=CUDA)  # float32: plain products that stop at the valid rows
    for p in wide.parameters():
        p.data = p.data.bfloat16().float()
    pool = PagePool(CUDA, 64 << 10, 256) if stashed else None
    moe = MoE(CONFIG, dispatch=make[kind](), pool=pool, device=CUDA, dtype=torch.bfloat16)
    moe.load_state_dict(wide.state_dict())
    x, dy = (torch.randn(TOKENS, 256, device=CUDA).bfloat16() for _ in range(2))
    weights = torch.rand(TOKENS, 4, device=CUDA)
    ids = torch.rand(TOKENS, 16, device=CUDA).argsort(1)[:, :4].int()
    ids[torch.rand(TOKENS, 4, device=CUDA) < 0.33] = -1
    got = gradients(moe, x, weights, ids, dy)
    wanted = gradients(wide, x.float(), weights, ids, dy.float())
    assert len(got) == 7
    for name, value in wanted.items():
        assert got[name].isfinite().all(), name
        assert float((got[name].float() - value).norm() / value.norm()) < 2e-2, name


def test_an_expert_chosen_twice_counts_twice():
    moe = MoE(CONFIG, device=CUDA, dtype=torch.bfloat16)
    ids = torch.tensor([[0, 0, 1, 1], [1, 2, 2, 2]], device=CUDA, dtype=torch.int32)
    x = torch.randn(2, 256, device=CUDA).bfloat16()
    moe.experts(x, torch.full((2, 4), 0.5, device=CUDA), ids).sum().backward()
    assert moe.expert_fc2.bias.grad[:4, 0].tolist() == [1.0, 1.5, 1.5, 0.0]


def test_garbage_in_rows_without_a_label_reaches_nothing():
    hidden, weight = (torch.randn(rows, 128, device=CUDA).bfloat16() for rows in (700, 1000))
    labels = torch.randint(0, 1000, (700,), device=CUDA)
    ignored = torch.rand(700, device=CUDA) < 0.3
    labels[ignored] = -100
    wanted = linear_cross_entropy(hidden, weight, labels, LossOptions(chunk=256))
    hidden[ignored] = torch.nan
    for one, two in zip(linear_cross_entropy(hidden, weight, labels, LossOptions(chunk=256)), wanted):
        assert torch.equal(one, two)
