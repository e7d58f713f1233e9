"""Rotary embedding of q and k: the same bits as the models' own functions, in new tensors, saving cos and sin."""

import pytest
import torch
from support import same
from support.tiers import slow
from torch.library import opcheck

from pagestash.kernels import backend as backends
from pagestash.kernels.layer.rope import STYLES, _rope, rope, rotate

B, S, H, D = 2, 3, 5, 16  # a program for each position, interpreted one by one
TOLERANCE = {
    torch.float64: {"rtol": 0, "atol": 0},
    torch.float32: {"rtol": 0, "atol": 0},
    torch.float16: {"rtol": 0, "atol": 0},
    torch.bfloat16: {"rtol": 2**-5, "atol": 2**-5},  # the interpreter cuts off instead of rounding
}


def queries_and_keys(dtype, heads=H, width=D):
    """[B, H, S, D] views of [B, S, H, D], as models have them; and one head of keys."""
    torch.manual_seed(0)
    q, k = torch.randn(B, S, heads, width, dtype=dtype), torch.randn(B, S, 1, width, dtype=dtype)
    return q.transpose(1, 2), k.transpose(1, 2)


def angles(dtype, width=D, batches=B):
    """cos and sin [B, S, width], whose two halves are the same."""
    angle = torch.rand(batches, S, width // 2).repeat(1, 1, 2) * 6
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *slow(*(each for each in TOLERANCE if each != torch.bfloat16))]
)
@pytest.mark.parametrize("style", STYLES)
def test_the_kernel_agrees_with_the_reference(dtype, style):
    kernel_agrees_with_the_reference(dtype, style, heads=H, rotated=D, batches=B)


def test_a_program_turns_more_heads_than_fit_a_tile_and_copies_the_rest_of_each():
    kernel_agrees_with_the_reference(torch.float32, "halves", heads=700, rotated=6, batches=1)


def kernel_agrees_with_the_reference(dtype, style, heads, rotated, batches):
    pytest.importorskip("triton")
    q, k = queries_and_keys(dtype, heads)
    width = rotated // 2 if style == "half_table" else rotated
    # Unlike those of a model, the halves differ here: each must be read from its own place.
    cos, sin = (torch.randn(batches, S, width, dtype=dtype) for _ in range(2))
    for wide in (False, True):
        for back in (False, True):
            options = {"style": style, "wide": wide, "back": back}
            got = rotate(q, k, cos, sin, **options, backend="triton")
            wanted = rotate(q, k, cos, sin, **options, backend="torch")
            for a, b in zip(got, wanted):
                assert a.stride() == b.stride()
                torch.testing.assert_close(a, b, **TOLERANCE[dtype])


@pytest.mark.parametrize("style", STYLES)
def test_gradients_are_those_of_the_function(monkeypatch, style):
    monkeypatch.setattr(backends, "interpreted", lambda: False)
    q, k = (each[:1].detach().requires_grad_() for each in queries_and_keys(torch.float64, 1, 6))
    cos, sin = angles(torch.float64, 2 if style == "half_table" else 4, batches=1)
    torch.autograd.gradcheck(lambda q, k: rope(q, k, cos, sin, style=style), (q, k))


def hugging_face(name):
    """A function of a model of transformers, the width of its table for D dimensions, and what ours calls it."""
    pytest.importorskip("transformers", minversion="5.7")
    from importlib import import_module

    model, function, width, options = {
        "Qwen3-MoE": ("qwen3_moe", "apply_rotary_pos_emb", D, {}),
        "GLM-4-MoE, part of the dimensions": ("glm4_moe", "apply_rotary_pos_emb", D // 2, {}),
        "gpt-oss": ("gpt_oss", "apply_rotary_pos_emb", D // 2, {"style": "half_table"}),
        "DeepSeek-V3": ("deepseek_v3", "apply_rotary_pos_emb_interleave", D, {"style": "deinterleave"}),
        "GLM-4": ("glm4", "apply_rotary_pos_emb", D // 2, {"style": "interleaved"}),
        "ERNIE-4.5-MoE": ("ernie4_5_moe", "apply_rotary_pos_emb", D, {"style": "interleaved", "wide": True}),
        "OLMo-2": ("olmo2", "apply_rotary_pos_emb", D, {"wide": True}),
    }[name]
    return getattr(import_module(f"transformers.models.{model}.modeling_{model}"), function), width, options


NAMES = (
    "Qwen3-MoE",
    "GLM-4-MoE, part of the dimensions",
    "gpt-oss",
    "DeepSeek-V3",
    "GLM-4",
    "ERNIE-4.5-MoE",
    "OLMo-2",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32, torch.float16)])
@pytest.mark.parametrize("heads_dim", [*slow(1), 2])
def test_results_and_gradients_are_those_of_transformers(monkeypatch, backend, name, dtype, heads_dim):
    monkeypatch.setattr(backends, "interpreted", lambda: backend == "triton")
    function, width, options = hugging_face(name)
    # Models with `wide` have their table in float32.
    cos, sin = angles(torch.float32 if options.get("wide") else dtype, width)
    theirs, ours = ([each.requires_grad_() for each in queries_and_keys(dtype)] for _ in range(2))

    def seen(tensors):
        return tensors if heads_dim == 1 else [each.transpose(1, 2) for each in tensors]

    wanted = function(*seen(theirs), cos, sin, unsqueeze_dim=heads_dim)
    got = rope(*seen(ours), cos, sin, heads_dim=heads_dim, **options)
    gradients = [torch.randn_like(each) for each in wanted]
    close = TOLERANCE[dtype] if backend == "triton" else {"rtol": 0, "atol": 0}
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, **close)
    if options.get("wide") and dtype != torch.float32:
        # Where theirs rounds each product of backward, ours rounds their sum.
        close = {"rtol": 2**-5, "atol": 2**-5} if dtype == torch.bfloat16 else {"rtol": 2**-8, "atol": 2**-8}
    got, wanted = torch.autograd.grad(got, ours, gradients), torch.autograd.grad(wanted, theirs, gradients)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, **close)


def test_saved_are_cos_and_sin_alone_and_nothing_is_overwritten():
    q, k = (each.requires_grad_() for each in queries_and_keys(torch.bfloat16))
    before = q.detach().clone(), k.detach().clone()
    cos, sin = angles(torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rope(q, k, cos, sin)
    assert {each.data_ptr() for each in saved} == {cos.data_ptr(), sin.data_ptr()}
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_a_slice_of_each_head_is_rotated_where_it_is(backend):
    """DeepSeek's q: the last part of every head."""
    q, k = queries_and_keys(torch.float32, width=3 * D)
    q, k = q[..., -D:], k[..., -D:]
    cos, sin = angles(torch.float32)
    got = rotate(q, k, cos, sin, style="deinterleave", backend=backend)
    wanted = rotate(q.contiguous(), k.contiguous(), cos, sin, style="deinterleave", backend=backend)
    assert same(got, wanted)


@pytest.mark.slow
def test_the_operator_passes_opcheck(monkeypatch):
    monkeypatch.setattr(backends, "interpreted", lambda: False)
    q, k = (each.detach().requires_grad_() for each in queries_and_keys(torch.float32))
    opcheck(_rope, (q, k, *angles(torch.float32), "halves", False))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"style": "spiral"}, "style='spiral'"),
        ({"heads_dim": 3}, "heads_dim=3"),
        ({"k": torch.ones(B, 1, S + 1, D)}, "alike but for the heads"),
        ({"cos": torch.ones(B, S, D + 2), "sin": torch.ones(B, S, D + 2)}, "even number of rotated"),
        ({"sin": torch.ones(B, S, D - 2)}, "expected both"),
    ],
)
def test_what_does_not_fit_is_refused(change, said):
    q, k = queries_and_keys(torch.float32)
    cos, sin = angles(torch.float32)
    with pytest.raises(ValueError, match=said):
        rope(**{"q": q, "k": k, "cos": cos, "sin": sin, **change})
