"""Rotary position embedding of queries and keys in one kernel, into new tensors.

Shapes: B batches, S positions, H heads, D dimensions of a head, of which the first R are rotated and the others
copied. `q` [B, H, S, D] and `k` have their own number of heads and any strides whose last is 1; the results keep
the layout of their inputs. A pair (x1, x2) of dimensions at one position becomes

    y1 = x1 · cos1 - x2 · sin1,    y2 = x2 · cos2 + x1 · sin2,

each product rounded to the tensors' dtype before the sum, as torch operators would; with `wide` all is in float32
and rounded once. The gradient is the rotation by the negative angle, so nothing but `cos` and `sin` is saved. They
carry no gradient.

`style` says which dimensions are a pair, and what `cos` and `sin` [B or 1, S, C] hold:

| style | pair i of x | pair i of y | C | used by |
| --- | --- | --- | --- | --- |
| `halves` | i, i + R/2 | the same | R: (cos1, cos2) = (cos[i], cos[i + R/2]) | Llama, Qwen, Mixtral, GLM-4-MoE |
| `half_table` | i, i + R/2 | the same | R/2 | gpt-oss, our decoder |
| `deinterleave` | 2i, 2i + 1 | i, i + R/2 | R, of which the first half is read | DeepSeek-V3 |
| `interleaved` | 2i, 2i + 1 | the same | R, of which the first half is read | GLM-4, ERNIE |

What moves, in b-byte elements: 2·b·D a head and position, each way; `cos` and `sin` stay in the cache.
"""

from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pagestash.kernels.backend import choose, launch, power_of_two, tl, triton
from pagestash.kernels.backward import differentiable_once
from pagestash.kernels.operator import operator

Style = Literal["halves", "half_table", "deinterleave", "interleaved"]
STYLES: tuple[Style, ...] = get_args(Style)

ELEMENTS = 2048
"""Of a tile of heads × pairs, over 4 warps. One program has all heads of a position, so that it reads cos once."""
WARPS = 4


def rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    style: Style = "halves",
    wide: bool = False,
    back: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`q` and `k` rotated; with `back` by the negative angle, which is the gradient of the first."""
    rotary = _check(q, k, cos, sin, style)
    if choose(q.device, backend) == "torch" or not q.numel() or not k.numel():
        turned = [_reference(x, cos, sin, rotary, style, wide, back) for x in (q, k)]
        return turned[0], turned[1]
    q, k, cos, sin = _unit_stride(q), _unit_stride(k), _unit_stride(cos), _unit_stride(sin)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    batches, heads, positions, dimensions = q.shape
    cos_b, cos_s, _ = cos.stride()
    sin_b, sin_s, _ = sin.stride()
    if cos.shape[0] == 1:  # one table for all batches
        cos_b = sin_b = 0
    launch(
        _rotate_kernel,
        (batches * positions,),
        q.device,
        q,
        k,
        q_out,
        k_out,
        cos,
        sin,
        positions,
        heads,
        k.shape[1],
        *q.stride()[:3],
        *k.stride()[:3],
        *q_out.stride()[:3],
        *k_out.stride()[:3],
        cos_b,
        cos_s,
        sin_b,
        sin_s,
        **_constants(dimensions, rotary, style, wide, back, q.dtype),
    )
    return q_out, k_out


@cache
def _constants(
    dimensions: int, rotary: int, style: Style, wide: bool, back: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    half = power_of_two(rotary // 2)
    return {
        "D": dimensions,
        "R": rotary,
        "IN_PAIRS": _interleaved(style, back, into=False),
        "OUT_PAIRS": _interleaved(style, back, into=True),
        "ONE_TABLE": style != "halves",
        "BACK": back,
        "ROUND": not wide,
        "WIDE": tl.float64 if dtype == torch.float64 else tl.float32,
        "HALF": half,
        "REST": power_of_two(dimensions - rotary) if dimensions > rotary else 0,
        "HEADS": max(1, ELEMENTS // half),
        "num_warps": WARPS,
        "enable_fp_fusion": False,  # each product rounds, as in torch, which multiplies and adds one by one
    }


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, style: str) -> int:
    """R, the dimensions that are rotated."""
    if style not in STYLES:
        raise ValueError(f"style={style!r}: expected one of {', '.join(STYLES)}")
    q_shape, k_shape, shape = q.shape, k.shape, cos.shape
    if q.ndim != 4 or k.ndim != 4 or q_shape[0] != k_shape[0] or q_shape[2:] != k_shape[2:]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)}: expected [B, H, S, D] alike but for the heads"
        )
    rotary = shape[-1] * (2 if style == "half_table" else 1)
    fits = len(shape) == 3 and shape[0] in (1, q_shape[0]) and shape[1] == q_shape[2] and sin.shape == shape
    if not fits or rotary > q_shape[3] or rotary % 2:
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} for q {tuple(q.shape)} of style {style!r}: "
            f"expected both [{q.shape[0]} or 1, {q.shape[2]}, C] with an even number of rotated dimensions"
        )
    return rotary


def _interleaved(style: str, back: bool, *, into: bool) -> bool:
    """Whether the pairs of what is read, or of what is written (`into`), stand side by side."""
    if style == "deinterleave":
        return back == into
    return style == "interleaved"


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# --- what: the torch reference ------------------------------------------------------------------------------


def _reference(
    x: Tensor, cos: Tensor, sin: Tensor, rotary: int, style: str, wide: bool, back: bool
) -> Tensor:
    turned, rest = x[..., :rotary], x[..., rotary:]
    if _interleaved(style, back, into=False):
        x1, x2 = turned[..., 0::2], turned[..., 1::2]
    else:
        x1, x2 = turned.chunk(2, -1)
    # [B or 1, 1, S, R/2] each.
    (cos1, cos2), (sin1, sin2) = (_halves(table, rotary, style) for table in (cos, sin))
    if back:
        sin1, sin2 = -sin2, -sin1
    if wide and x.dtype != torch.float64:
        x1, x2, cos1, cos2, sin1, sin2 = (each.float() for each in (x1, x2, cos1, cos2, sin1, sin2))
    y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    if _interleaved(style, back, into=True):
        y = torch.stack([y1, y2], -1).flatten(-2)
    else:
        y = torch.cat([y1, y2], -1)
    return torch.empty_like(x).copy_(torch.cat([y.to(x.dtype), rest], -1))


def _halves(table: Tensor, rotary: int, style: str) -> tuple[Tensor, Tensor]:
    first, second = table[..., : rotary // 2], table[..., rotary // 2 :]
    return first[:, None], (second if style == "halves" else first)[:, None]


# --- how: the Triton kernel ---------------------------------------------------------------------------------


@triton.jit
def _rounded(value, dtype: tl.constexpr, ROUND: tl.constexpr):
    if ROUND:
        value = value.to(dtype).to(value.dtype)
    return value


@triton.jit
def _rotate_heads(
    x,
    out,
    heads,
    in_head,
    out_head,
    tables,
    D: tl.constexpr,
    R: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    OUT_PAIRS: tl.constexpr,
    ROUND: tl.constexpr,
    WIDE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
):
    """All heads of one position, whose first element `x` and `out` point to."""
    cos1, sin1, cos2, sin2 = tables
    TYPE: tl.constexpr = x.dtype.element_ty
    pair = tl.arange(0, HALF)
    if IN_PAIRS:
        in_first = 2 * pair
        in_second = 2 * pair + 1
    else:
        in_first = pair
        in_second = pair + R // 2
    if OUT_PAIRS:
        out_first = 2 * pair
        out_second = 2 * pair + 1
    else:
        out_first = pair
        out_second = pair + R // 2
    for start in tl.range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        mask = (head < heads)[:, None] & (pair < R // 2)[None, :]
        at = x + head.to(tl.int64)[:, None] * in_head
        to = out + head.to(tl.int64)[:, None] * out_head
        x1 = tl.load(at + in_first[None, :], mask=mask, other=0.0).to(WIDE)
        x2 = tl.load(at + in_second[None, :], mask=mask, other=0.0).to(WIDE)
        y1 = _rounded(x1 * cos1, TYPE, ROUND) - _rounded(x2 * sin1, TYPE, ROUND)
        y2 = _rounded(x2 * cos2, TYPE, ROUND) + _rounded(x1 * sin2, TYPE, ROUND)
        tl.store(to + out_first[None, :], y1.to(TYPE), mask=mask)
        tl.store(to + out_second[None, :], y2.to(TYPE), mask=mask)
        if REST:
            rest = R + tl.arange(0, REST)
            mask = (head < heads)[:, None] & (rest < D)[None, :]
            tl.store(to + rest[None, :], tl.load(at + rest[None, :], mask=mask, other=0.0), mask=mask)


@triton.jit
def _rotate_kernel(
    q,
    k,
    q_out,
    k_out,
    cos,
    sin,
    positions,
    q_heads,
    k_heads,
    q_b,
    q_h,
    q_s,
    k_b,
    k_h,
    k_s,
    q_out_b,
    q_out_h,
    q_out_s,
    k_out_b,
    k_out_h,
    k_out_s,
    cos_b,
    cos_s,
    sin_b,
    sin_s,
    D: tl.constexpr,
    R: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    OUT_PAIRS: tl.constexpr,
    ONE_TABLE: tl.constexpr,  # both of a pair have the cos and sin of the first half
    BACK: tl.constexpr,
    ROUND: tl.constexpr,
    WIDE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
):
    b = (tl.program_id(0) // positions).to(tl.int64)
    s = (tl.program_id(0) % positions).to(tl.int64)
    pair = tl.arange(0, HALF)
    inside = pair < R // 2
    cos1 = tl.load(cos + b * cos_b + s * cos_s + pair, mask=inside, other=0.0).to(WIDE)
    sin1 = tl.load(sin + b * sin_b + s * sin_s + pair, mask=inside, other=0.0).to(WIDE)
    if ONE_TABLE:
        cos2 = cos1
        sin2 = sin1
    else:
        cos2 = tl.load(cos + b * cos_b + s * cos_s + R // 2 + pair, mask=inside, other=0.0).to(WIDE)
        sin2 = tl.load(sin + b * sin_b + s * sin_s + R // 2 + pair, mask=inside, other=0.0).to(WIDE)
    if BACK:
        swapped = -sin2
        sin2 = -sin1
        sin1 = swapped
    tables = (cos1[None, :], sin1[None, :], cos2[None, :], sin2[None, :])
    q_at = q + b * q_b + s * q_s
    q_to = q_out + b * q_out_b + s * q_out_s
    _rotate_heads(
        q_at, q_to, q_heads, q_h, q_out_h, tables, D, R, IN_PAIRS, OUT_PAIRS, ROUND, WIDE, HALF, REST, HEADS
    )
    k_at = k + b * k_b + s * k_s
    k_to = k_out + b * k_out_b + s * k_out_s
    _rotate_heads(
        k_at, k_to, k_heads, k_h, k_out_h, tables, D, R, IN_PAIRS, OUT_PAIRS, ROUND, WIDE, HALF, REST, HEADS
    )


# --- the operator -------------------------------------------------------------------------------------------


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    style: Style = "halves",
    wide: bool = False,
    heads_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """`q` and `k` rotated by `cos` and `sin`, differentiable in both; see the file's head.

    `heads_dim` is where the heads are: 1 for [B, H, S, D], 2 for [B, S, H, D].
    """
    if heads_dim == 2:
        q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, style=style, wide=wide)
        return q.transpose(1, 2), k.transpose(1, 2)
    if heads_dim != 1:
        raise ValueError(f"heads_dim={heads_dim}: expected 1 for [B, H, S, D] or 2 for [B, S, H, D]")
    if torch.compiler.is_compiling():
        rotated_q, rotated_k = _rope(q, k, cos, sin, style, wide)
        return rotated_q, rotated_k
    return _Rope.apply(q, k, cos, sin, (style, wide))


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, settings: tuple[Style, bool]
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.settings = style, wide = settings
        return rotate(q, k, cos, sin, style=style, wide=wide)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, of_q: Tensor, of_k: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        style, wide = ctx.settings
        return *rotate(of_q, of_k, cos, sin, style=style, wide=wide, back=True), None, None, None


_rope = operator(
    "rope",
    _Rope,
    "Tensor q, Tensor k, Tensor cos, Tensor sin, str style, bool wide",
    lambda q, k, *_: (torch.empty_like(q), torch.empty_like(k)),
    keeps=(2, 3),
    results=2,
)
