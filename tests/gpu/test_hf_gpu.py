"""RMSNorm, RoPE and models of transformers on a GPU: against the references, in bf16, in a CUDA graph."""

import pytest
import torch
from support import error, same

from pagestash.kernels.layer import rms_norm as N
from pagestash.kernels.layer import rope as R

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 4096, 2048), (3, 1000, 32, 128), (513, 7168), (5, 1537), (1, 16384)])
@pytest.mark.parametrize(("offset", "early"), [(0.0, True), (0.0, False), (1.0, False)])
def test_norms_are_those_of_the_reference(shape, dtype, offset, early):
    x, dy = (torch.randn(shape, device=CUDA, dtype=dtype) for _ in range(2))
    weight = torch.randn(shape[-1], device=CUDA, dtype=dtype)
    y, rstd = N.forward(x, weight, 1e-6, offset, early, backend="triton")
    wanted, wanted_rstd = N.forward(x, weight, 1e-6, offset, early, backend="torch")
    torch.testing.assert_close(rstd, wanted_rstd, rtol=1e-5, atol=0)
    step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]
    # Sums in another order change a last bit of rstd, and so now and then a rounding.
    torch.testing.assert_close(y, wanted, rtol=2 * step, atol=1e-6)
    if dtype != torch.float32:
        assert (y == wanted).float().mean() > 0.98
    got = N.backward(dy, x, weight, rstd, offset, early, need_weight=True, backend="triton")
    again = N.backward(dy, x, weight, rstd, offset, early, need_weight=True, backend="triton")
    assert same(got, again)
    wanted = N.backward(dy, x, weight, rstd, offset, early, need_weight=True, backend="torch")
    assert error(got[0], wanted[0]) < step
    assert error(got[1], wanted[1]) < step


def test_a_slice_of_a_wider_projection_is_normalised_where_it_is():
    x = torch.randn(2, 512, 576, device=CUDA, dtype=torch.bfloat16)[..., :512]
    weight = torch.randn(512, device=CUDA, dtype=torch.bfloat16)
    got = N.forward(x, weight, 1e-6, 0.0, True)
    assert same(got, N.forward(x.contiguous(), weight, 1e-6, 0.0, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("style", R.STYLES)
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "rotated"),
    [(32, 4, 128, 128), (64, 8, 64, 64), (6, 1, 96, 32), (128, 1, 64, 64)],
)
@pytest.mark.parametrize("wide", [False, True])
def test_rotations_are_those_of_the_reference(dtype, style, heads, key_heads, width, rotated, wide):
    q, k = (
        torch.randn(2, 700, count, width, device=CUDA, dtype=dtype).transpose(1, 2)
        for count in (heads, key_heads)
    )
    columns = rotated // 2 if style == "half_table" else rotated
    table = torch.float32 if wide else dtype
    cos, sin = (torch.randn(2, 700, columns, device=CUDA).to(table) for _ in range(2))
    for back in (False, True):
        options = {"style": style, "wide": wide, "back": back}
        got = R.rotate(q, k, cos, sin, **options, backend="triton")
        wanted = R.rotate(q, k, cos, sin, **options, backend="torch")
        for a, b in zip(got, wanted):
            assert a.stride() == b.stride()
            if dtype == torch.float32 or wide:  # a product may be fused with the sum
                step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6}[dtype]
                torch.testing.assert_close(a, b, rtol=step, atol=10 * step)
            else:
                assert same(a, b)


def test_norm_and_rotation_can_be_captured():
    x = torch.randn(2, 64, 8, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = (torch.randn(1, 64, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(2))

    def step():
        q = N.rms_norm(x, weight).transpose(1, 2)
        q, k = R.rope(q, q[:, :1], cos, sin)
        return torch.autograd.grad((q.square().sum() + k.sum()), [x, weight])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    assert same(got, wanted)


def test_an_optimised_model_is_as_near_to_float32_as_the_plain_one():
    pytest.importorskip("transformers", minversion="5.7")
    from support.hf_gpu import qwen, run

    import pagestash.hf

    exact = run(qwen("eager", torch.float32))
    plain = run(qwen("grouped_mm"))

    model = qwen("pagestash")
    report = pagestash.hf.optimize(model)
    assert report.left == []
    got = run(model)
    torch.testing.assert_close(got[0], exact[0], rtol=2e-3, atol=0)
    flat = [
        torch.cat([each.float().flatten() for each in found[1].values()]) for found in (exact, plain, got)
    ]
    assert error(flat[2], flat[0]) <= 1.1 * error(flat[1], flat[0])


LAYOUTS = {
    "gpt-oss": ("clamp, slope, one more", {"transposed": True, "bias": True, "concatenated": False}),
    "interleaved": ("clamped", {"concatenated": False}),
    "privacy filter": ("clamped", {"transposed": True, "bias": True}),
    "DeepSeek-V4": ("clamp, silu", {}),
    "exact gelu": ("exact gelu", {}),
    "Nemotron-H": ("relu2, no gate", {}),
    "no gate, turned, biases": ("relu2, no gate", {"transposed": True, "bias": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("foreign", [False, True])
def test_experts_of_any_layout_are_as_near_to_float32_as_grouped_mm(layout, foreign):
    """With ids of other ranks (`foreign`) the tails of all buffers are garbage, which is NaN here."""
    pytest.importorskip("transformers", minversion="5.7")
    from support.activations import VARIANTS
    from support.hf_experts import D, E, experts_of
    from transformers.integrations.moe import grouped_mm_experts_forward

    import pagestash.hf  # noqa: F401

    name, how = LAYOUTS[layout]
    made = {
        dtype: experts_of(VARIANTS[name], dtype=dtype, **how) for dtype in (torch.float32, torch.bfloat16)
    }
    torch.manual_seed(1)
    tokens = torch.randn(300, D).bfloat16()
    ids = torch.rand(300, E).argsort(1)[:, :2]
    ids[torch.rand(ids.shape) < (0.7 if foreign else 0.0)] = E
    weights, gradient = torch.rand(300, 2).masked_fill(ids == E, 0.0), torch.randn(300, D).bfloat16()

    def run(experts, device, function=None):
        experts = experts.to(device)
        experts._is_expert_parallel = True
        dtype = next(experts.parameters()).dtype
        x = tokens.to(device, dtype, copy=True).requires_grad_()
        given = weights.to(device, copy=True).requires_grad_()
        torch.full((1 << 22,), torch.nan, device=device)  # what the next buffers are made of
        y = (function or type(experts).forward)(experts, x, ids.to(device), given)
        inputs = [x, given, *experts.parameters()]
        return [y, *torch.autograd.grad(y, inputs, gradient.to(device, dtype))]

    exact = run(made[torch.float32], "cpu", grouped_mm_experts_forward)
    wide = run(made[torch.float32], CUDA)
    theirs = run(made[torch.bfloat16], CUDA, grouped_mm_experts_forward)
    got = run(made[torch.bfloat16], CUDA)
    for one, two, ours, plain in zip(exact, wide, got, theirs):
        assert error(two.cpu(), one) < 1e-5
        assert error(ours.cpu(), one) <= 1.2 * error(plain.cpu(), one) + 2**-8


def test_a_policy_changes_no_bit_of_an_optimised_model():
    pytest.importorskip("transformers", minversion="5.7")
    from support.hf_gpu import qwen, run

    import pagestash as ps
    import pagestash.hf

    model = qwen("pagestash", attention="eager")  # the gradient of the flash kernel is added up by atomics
    pagestash.hf.optimize(model)
    wanted = run(model)
    assert same(run(model), wanted), "without a policy the step is deterministic"
    rules = [
        ps.Rule("model.layers.*.*_layernorm", "recompute", min_bytes=0),
        ps.Rule("model.layers.*.mlp.experts.moe_act", "stash", min_bytes=0),
        ps.Rule("model.layers.*.self_attn.core_attn", "offload", min_bytes=0),
    ]
    keeper = ps.Keeper(ps.Policy(rules=rules)).attach(model)
    for _ in range(4):
        with keeper.step():
            got = run(model)
        assert same(got, wanted)
    assert keeper.pool is not None


def test_a_graphed_step_is_the_eager_one():
    pytest.importorskip("transformers", minversion="5.7")
    from support.hf_gpu import qwen, train

    import pagestash.hf

    losses = []
    for graph in (False, True):
        model = qwen("pagestash")
        pagestash.hf.optimize(model)
        losses.append(train(model, graph=graph)[0])
    torch.testing.assert_close(losses[1], losses[0], rtol=5e-3, atol=0)  # the flash kernel adds by atomics


def test_a_graphed_step_under_the_example_policy_has_the_bits_of_an_eager_one_without():
    pytest.importorskip("transformers", minversion="5.7")
    from dataclasses import replace
    from pathlib import Path

    from support.hf_gpu import qwen, train

    import pagestash as ps
    import pagestash.hf

    policy = ps.Policy.load(Path(__file__).parents[2] / "examples" / "huggingface.toml")
    rules = [replace(rule, min_bytes=0) for rule in policy.rules]
    found = []
    # (The flash kernel adds by atomics.)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for under, graph in (((), False), (rules, False), (rules, True)):
            model = qwen("pagestash")
            pagestash.hf.optimize(model)
            losses, step = train(model, *under, graph=graph)
            found.append((losses, list(model.parameters())))
            assert step.reruns == 0
    assert same(found[1], found[0])
    assert same(found[2], found[0])


def test_a_step_of_an_optimised_model_never_waits_for_the_device():
    pytest.importorskip("transformers", minversion="5.7")
    from support.hf_gpu import qwen

    import pagestash as ps
    import pagestash.hf

    model = qwen("pagestash")
    ids = torch.randint(3, 96, (2, 128), device=CUDA)
    plain, packed = {"input_ids": ids, "labels": ids}, torch.arange(64, device=CUDA).repeat(2, 2)
    assert ps.profile(model, plain, repeats=1).host_waits, "transformers looks for packed sequences"
    pagestash.hf.optimize(model)
    assert not ps.profile(model, plain, repeats=1).host_waits
    assert ps.profile(model, {**plain, "position_ids": packed}, repeats=1).host_waits
    keeper = ps.Keeper(ps.Policy([ps.Rule("model.layers.*", "recompute")])).attach(model)
    for number in range(4):
        if number == 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            with keeper.step():
                model(**plain).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
