"""LoRA on experts on a GPU: the kernel against float64, models against PEFT in bf16, saved bytes, a CUDA graph."""

import pytest
import torch
from support import error, same

from pagestash.kernels.moe.low_rank import add_product_, add_product_reference_
from pagestash.kernels.moe.route import route
from pagestash.moe.local import local_experts
from pagestash.moe.projection import LowRank, Weight
from pagestash.moe.received import received_experts
from pagestash.moe.saving import BlockOptions

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("rank", [16, 48, 64, 160])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "columns", "experts"), [(5000, 1536, 128), (700, 200, 3), (300, 5760, 32)])
def test_products_are_added_to_the_rows_of_their_experts(rank, turned, rows, columns, experts):
    torch.manual_seed(0)
    out, left = (torch.randn(rows, each, device=CUDA, dtype=torch.bfloat16) for each in (columns, rank))
    shape = (experts, columns, rank) if turned else (experts, rank, columns)
    right = torch.randn(shape, device=CUDA, dtype=torch.bfloat16)
    right = right.transpose(1, 2) if turned else right
    valid = rows - 37
    ends = torch.randint(0, valid + 1, (experts,)).sort().values.to(CUDA, torch.int32)
    ends[-1] = valid
    left[valid:] = torch.nan
    wanted = out.double()
    add_product_reference_(wanted, left.double(), right.double(), ends)
    before = out.clone()
    got = add_product_(out, left, right, ends, backend="triton")
    assert error(got[:valid], wanted[:valid]) < 3e-3
    assert same(got[valid:], before[valid:])


@pytest.mark.parametrize(("received", "expected"), [(False, 0), (True, 0), (True, 9)])
@pytest.mark.parametrize("tokens", [0, 5])
def test_without_rows_gradients_are_zeros(received, expected, tokens):
    """No token at all, or none of whose choices is an expert here."""
    shapes = [(3, 128, 64), (3, 64, 64), (3, 16, 64), (3, 128, 16), (3, 16, 64), (3, 64, 16)]
    leaves = [torch.randn(s, device=CUDA).bfloat16().requires_grad_() for s in shapes]
    up, down = (Weight(leaves[i], None, LowRank(leaves[j], leaves[j + 1], 1.0)) for i, j in ((0, 2), (1, 4)))
    x = torch.randn(tokens, 64, device=CUDA).bfloat16().requires_grad_()
    ids, choices = torch.full((tokens, 2), -1, device=CUDA), torch.rand(tokens, 2, device=CUDA)
    given = (x, choices, up, down, ids, route(ids, 3), BlockOptions())
    y = received_experts(*given, expected_rows=expected) if received else local_experts(*given)
    y.sum().backward()
    assert not y.any()
    assert not any(each.grad.any() for each in (x, *leaves))


def adapted(experts, dtype=torch.bfloat16, attention="sdpa", **options):
    pytest.importorskip("transformers", minversion="5.7")
    peft = pytest.importorskip("peft")
    from support.hf_gpu import qwen

    given = {
        "r": 16,
        "lora_alpha": 24,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    with CUDA:
        model = peft.get_peft_model(
            qwen(experts, dtype, attention), peft.LoraConfig(**(given | options))
        ).train()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.copy_(0.05 * torch.randn(value.shape, generator=generator))
    return model


@pytest.mark.parametrize("rank", [4, 16])
def test_bf16_is_as_near_to_float32_as_peft_is(rank):
    pytest.importorskip("transformers", minversion="5.7")
    from support.hf_gpu import run

    import pagestash.hf

    exact = run(adapted("eager", torch.float32, r=rank))
    theirs = run(adapted("grouped_mm", r=rank))
    model = adapted("pagestash", r=rank)
    report = pagestash.hf.optimize(model)
    assert [each.part for each in report.replaced].count("lora") >= 6
    got = run(model)
    torch.testing.assert_close(got[0], exact[0], rtol=2e-3, atol=0)
    for part in ("experts", "self_attn"):
        flat = [
            torch.cat([value.float().flatten() for name, value in found[1].items() if part in name])
            for found in (exact, theirs, got)
        ]
        assert error(flat[2], flat[0]) <= 1.3 * error(flat[1], flat[0])  # some routes flip


def test_no_copy_of_a_weight_is_saved():
    import pagestash.hf

    model = adapted("pagestash")
    pagestash.hf.optimize(model)
    experts = model.get_base_model().model.layers[0].mlp.experts
    x = torch.randn(64, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.rand(64, 16, device=CUDA).argsort(1)[:, :4]
    weights = torch.rand(64, 4, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor
    ):
        experts(x, ids, weights)
    own = {each.untyped_storage().data_ptr() for each in experts.parameters()}
    large = sum(each.nbytes for at, each in saved.items() if at not in own and each.dtype == torch.bfloat16)
    # The tokens, the first projection, and the weights of the choices as they came.
    assert large == 2 * 64 * 256 + 4 * 64 * 4 * 128 + 2 * 64 * 4


def test_a_policy_changes_no_bit():
    pytest.importorskip("transformers", minversion="5.7")
    from support.hf_gpu import run

    import pagestash as ps
    import pagestash.hf

    model = adapted("pagestash", attention="eager")  # the gradient of the flash kernel is added up by atomics
    pagestash.hf.optimize(model)
    wanted = run(model)
    assert same(run(model), wanted), "without a policy the step is deterministic"
    for experts in ("stash", "recompute"):
        rules = [
            ps.Rule("model.layers.*.*_layernorm", "recompute", min_bytes=0),
            ps.Rule("model.layers.*.mlp.experts.moe_act", experts, min_bytes=0),
            ps.Rule("model.layers.*.self_attn.core_attn", "offload", min_bytes=0),
        ]
        keeper = ps.Keeper(ps.Policy(rules=rules)).attach(model)
        for _ in range(4):
            with keeper.step():
                got = run(model)
            assert same(got, wanted)
        keeper.detach()


def test_a_graphed_step_is_the_eager_one():
    pytest.importorskip("transformers", minversion="5.7")
    from support.hf_gpu import train

    import pagestash as ps
    import pagestash.hf

    losses = []
    for graph in (False, True):
        model = adapted("pagestash")
        pagestash.hf.optimize(model)
        losses.append(train(model, ps.Rule("**.moe_act", "stash", min_bytes=0), graph=graph)[0])
    torch.testing.assert_close(losses[1], losses[0], rtol=5e-3, atol=0)  # the flash kernel adds by atomics
