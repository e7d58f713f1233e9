"""RMSNorm: the same numbers as the models' own modules, forward and backward, saving x and a scale."""

import pytest
import torch
from support import same
from torch.library import opcheck

from pagestash.kernels import backend as backends
from pagestash.kernels.layer.rms_norm import _rms_norm, backward, forward, rms_norm
from pagestash.kernels.layer.strided_rows import HEADS as MOST_HEADS
from pagestash.kernels.layer.strided_rows import rows_of

TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-9, "atol": 2**-9},
    torch.bfloat16: {"rtol": 2**-5, "atol": 2**-4},  # the interpreter cuts off instead of rounding
}


def tensors(shape, dtype):
    torch.manual_seed(0)
    return (
        torch.randn(shape, dtype=dtype),
        torch.randn(shape[-1], dtype=dtype),
        torch.randn(shape, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 16), (33, 100), (2, 2049), (0, 8)])
def test_the_kernels_agree_with_the_reference(shape, dtype):
    pytest.importorskip("triton")
    x, weight, dy = tensors(shape, dtype)
    for offset, early in [(0.0, True), (1.0, False)]:
        kernels_agree_with_the_reference(x, weight, dy, offset, early)


def kernels_agree_with_the_reference(x, weight, dy, offset, early):
    dtype = x.dtype
    for by in (weight, None):
        y, rstd = forward(x, by, 1e-6, offset, early, backend="triton")
        wanted, wanted_rstd = forward(x, by, 1e-6, offset, early, backend="torch")
        assert (y.dtype, y.shape) == (wanted.dtype, wanted.shape)
        torch.testing.assert_close(y, wanted, **TOLERANCE[dtype])
        torch.testing.assert_close(rstd, wanted_rstd)
        need = by is not None
        got = backward(dy, x, by, rstd, offset, early, need_weight=need, backend="triton")
        wanted = backward(dy, x, by, rstd, offset, early, need_weight=need, backend="torch")
        torch.testing.assert_close(got[0], wanted[0], **TOLERANCE[dtype])
        assert (got[1] is None) == (wanted[1] is None) == (not need)
        if need:
            torch.testing.assert_close(got[1], wanted[1], **TOLERANCE[dtype])


@pytest.mark.parametrize("early", [True, False])
def test_a_slice_of_a_wider_projection_is_read_where_it_is(backend, early):
    x, weight, dy = tensors((4, 3, 24), torch.float32)
    x, weight, dy = x[..., :16], weight[:16], dy.transpose(0, 1)[..., 8:].transpose(0, 1)
    y, rstd = forward(x, weight, 1e-6, 0.0, early, backend=backend)
    wanted, _ = forward(x.contiguous(), weight, 1e-6, 0.0, early, backend=backend)
    assert torch.equal(y, wanted)
    got = backward(dy, x, weight, rstd, 0.0, early, need_weight=True, backend=backend)
    wanted = backward(
        dy.contiguous(), x.contiguous(), weight, rstd, 0.0, early, need_weight=True, backend=backend
    )
    assert same(got, wanted)


HEADS = {
    "queries": lambda qkv: qkv[:, :, :4],
    "keys": lambda qkv: qkv[:, :, 4:6],
    "one head": lambda qkv: qkv[:, :, 6:7],
    "heads first": lambda qkv: qkv[:, :, :4].transpose(1, 2),  # three steps: it is copied
    "one token": lambda qkv: qkv[1:, 2:3, :4],
    "dimensions of a head": lambda qkv: qkv[:, :, :, 4:12],
    "every other dimension": lambda qkv: qkv[..., ::2],  # copied
    "the same head for all": lambda qkv: qkv[:, :, :1].expand(-1, -1, 3, -1),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_a_fused_projection_are_read_where_they_are(backend, name):
    if backend == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    x, dy = (HEADS[name](torch.randn(2, 5, 8, 16)) for _ in range(2))
    weight = torch.randn(x.shape[-1])
    y, rstd = forward(x, weight, 1e-6, 0.0, False, backend=backend)
    wanted, wanted_rstd = forward(x.contiguous(), weight, 1e-6, 0.0, False, backend=backend)
    assert y.is_contiguous()
    assert same([y, rstd], [wanted, wanted_rstd])
    got = backward(dy, x, weight, rstd, 0.0, False, need_weight=True, backend=backend)
    alike = dy.contiguous(), x.contiguous(), weight, rstd, 0.0, False
    assert same(got, backward(*alike, need_weight=True, backend=backend))


def test_heads_are_not_copied_and_a_part_of_a_sequence_is():
    """Kernels are compiled for the number of rows that stand together: for each number of heads, for no length."""
    qkv = torch.randn(2, 5, 8, 16)
    copied = {
        name
        for name, heads in HEADS.items()
        if rows_of(heads(qkv), 16).at.data_ptr() != heads(qkv).data_ptr()
    }
    assert copied == {"heads first", "every other dimension"}
    part = torch.randn(2, 2 * MOST_HEADS, 16)[:, : MOST_HEADS + 1]
    assert rows_of(part, 16).together == 1


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradients_are_those_of_the_function(monkeypatch, offset, early):
    monkeypatch.setattr(backends, "interpreted", lambda: False)
    x, weight, _ = (each.requires_grad_() for each in tensors((3, 2, 7), torch.float64))
    torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, offset=offset, early=early), (x, weight))
    torch.autograd.gradcheck(lambda x: rms_norm(x, None, offset=offset, early=early), x)


def hugging_face(name, width, weight, dtype):
    """A norm of a model of transformers, and the arguments for ours."""
    pytest.importorskip("transformers", minversion="5.7")
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    kinds = {
        "Qwen3-MoE": (Qwen3MoeRMSNorm, {}),
        "gpt-oss": (GptOssRMSNorm, {"early": False}),
        "Gemma3": (Gemma3RMSNorm, {"early": False, "offset": 1.0}),
    }
    kind, options = kinds[name]
    module = kind(width, eps=1e-5).to(dtype)
    module.weight.data.copy_(weight)
    return module, options


@pytest.mark.parametrize("name", ["Qwen3-MoE", "gpt-oss", "Gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_and_gradients_are_those_of_transformers(monkeypatch, backend, name, dtype):
    monkeypatch.setattr(backends, "interpreted", lambda: backend == "triton")
    x, weight, dy = tensors((2, 9, 64), dtype)
    module, options = hugging_face(name, 64, weight, dtype)
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    parameter = module.weight.detach().clone().requires_grad_()
    wanted, got = module(theirs), rms_norm(ours, parameter, 1e-5, **options)
    wanted.backward(dy)
    got.backward(dy)
    if backend == "torch":  # to the bit, but for where a mean in another order rounds otherwise
        assert (got == wanted).float().mean() > 0.99
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])
    # Theirs rounds between backward's operators; ours once.
    rough = {key: 4 * value for key, value in TOLERANCE[dtype].items()}
    torch.testing.assert_close(ours.grad, theirs.grad, **rough)
    torch.testing.assert_close(parameter.grad, module.weight.grad, **rough)


def test_a_wider_weight_gives_the_wider_result(monkeypatch, backend):
    monkeypatch.setattr(backends, "interpreted", lambda: backend == "triton")
    x, _, _ = tensors((4, 16), torch.bfloat16)
    weight = torch.randn(16, requires_grad=True)
    y = rms_norm(x, weight)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_saved_are_the_input_itself_and_one_number_a_row():
    x, weight, _ = tensors((6, 32), torch.bfloat16)
    x.requires_grad_()
    weight.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rms_norm(x, weight)
    assert sorted(each.nbytes for each in saved) == [6 * 4, 32 * 2, 6 * 32 * 2]
    assert {x.data_ptr(), weight.data_ptr()} <= {each.data_ptr() for each in saved}


def test_a_frozen_weight_gets_no_gradient():
    x, weight, dy = tensors((6, 32), torch.float32)
    x.requires_grad_()
    rms_norm(x, weight).backward(dy)
    assert weight.grad is None
    assert x.grad is not None


def test_operators_pass_opcheck(monkeypatch):
    monkeypatch.setattr(backends, "interpreted", lambda: False)
    x, weight, dy = (each.requires_grad_() for each in tensors((5, 8), torch.float32))
    rstd = torch.rand(5)
    for arguments in [(x, weight, 1e-6, 0.0, True), (x, None, 1e-6, 1.0, False)]:
        opcheck(_rms_norm, arguments)
    of_norm = torch.ops.pagestash.rms_norm_backward.default
    x, weight, dy = x.detach(), weight.detach(), dy.detach()
    for saved, needs in [([x, weight, rstd], [True, True]), ([x, None, rstd], [True, False])]:
        opcheck(of_norm, ([dy], saved, needs, 1e-6, 0.0, True))


@pytest.mark.parametrize(
    ("x", "weight", "said"),
    [
        (torch.ones(2, 4), torch.ones(3), "expected a contiguous [4]"),
        (torch.ones(2, 4, dtype=torch.int64), None, "expected floating rows"),
    ],
)
def test_what_does_not_fit_is_refused(x, weight, said):
    with pytest.raises(ValueError, match=said.replace("[", r"\[").replace("]", r"\]")):
        rms_norm(x, weight)
