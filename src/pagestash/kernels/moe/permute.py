"""Token rows into expert order, and back to their tokens.

`inverse[token, k]` names the row of a token's k-th choice, or -1. `spread` writes each token's row to its
places, `combine` sums a token's places in the order of k. Each is the other's backward, so neither direction
needs an atomic addition, and both give the same bits every time.

What moves: a token's row once, and each of its places once. (Going by rows instead would read a token's row K
times: 2.0 GiB rather than 1.1 at T=32,768, d=2048, K=8.)
"""

import torch

from pagestash.kernels.backend import choose, tl, triton
from pagestash.kernels.pages.layout import K_BYTES, K_GRANTED, K_HEADER, K_STATUS
from pagestash.kernels.pages.paged import Pages, arguments, copy_rows, is_wide, page_pointers, widest_block

ELEMENTS = 4096
"""Of a tile, over 4 warps: 64 bytes a thread in flight for each place."""
WARPS = 4
ALIGNMENT = 256


def padded_rows(rows: int, alignment: int = ALIGNMENT) -> int:
    """The rows to allocate for `rows`: varying sizes then ask the allocator for the same few blocks."""
    return -(-rows // alignment) * alignment


def empty_rows(rows: int, width: int, like: torch.Tensor, alignment: int = ALIGNMENT) -> torch.Tensor:
    """An uninitialised `[rows, width]` tensor in a block that is padded to `alignment` rows."""
    padded = torch.empty(padded_rows(rows, alignment), width, dtype=like.dtype, device=like.device)
    return padded[:rows]


def spread(
    tokens: torch.Tensor,
    inverse: torch.Tensor,
    capacity: int,
    weights: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """`[capacity, width]` with each token's row at its places, times the weight [T, K] of each, if given.

    Rows that are nobody's place are left as they are: uninitialised.
    """
    return spread_in_two(tokens, inverse, 0, capacity, weights, backend=backend)[1]


def spread_in_two(
    tokens: torch.Tensor,
    inverse: torch.Tensor,
    head: int,
    capacity: int,
    weights: torch.Tensor | None = None,
    *,
    rest: torch.Tensor | None = None,
    pages: Pages | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`spread` into two buffers, of the first `head` rows and of the rest, which may be given.

    With `pages` the rest is stashed as it is written, where they were granted.
    """
    _check(tokens, inverse, weights, "tokens")
    width = tokens.shape[1]
    first = empty_rows(head, width, tokens)
    if rest is None:
        rest = empty_rows(capacity - head, width, tokens)
    if choose(tokens.device, backend) == "torch":
        out = torch.cat([first[:head], rest])
        spread_reference(tokens, inverse, weights, out)
        first[:head] = out[:head]
        rest.copy_(out[head:])
        if pages is not None:
            copy_rows(pages, rest, int((inverse >= head).sum()), to_pages=True)
    elif tokens.numel():
        block, together = _tile(tokens, pages)
        grid = (triton.cdiv(inverse.shape[0], together), triton.cdiv(width, block))
        _spread_kernel[grid](
            tokens,
            inverse,
            inverse if weights is None else weights,
            first,
            rest,
            head,
            inverse.shape[0],
            width,
            *arguments(pages, rest),
            K=inverse.shape[1],
            WEIGHTED=weights is not None,
            SPLIT=head > 0,
            PAGED=pages is not None,
            PAGE=65536 if pages is None else pages.memory.page_bytes,
            WIDE=is_wide(width, block, tokens.element_size()),
            WHOLE=width % block == 0,
            TOKENS=together,
            BLOCK=block,
            num_warps=WARPS,
        )
    return first, rest


def combine(
    rows: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    rest: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_ids: torch.Tensor | None = None,
    bias_weights: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`[T, width]`: each token's rows, times `weights` [T, K] if given, summed in float32 for k = 0, 1, ….

    With `bias` [E, width] each place adds `bias_weights[t, k] * bias[bias_ids[t, k]]`; `added` [T, width] is
    where the sum starts. `rest` holds the rows that follow those of `rows`.
    """
    _check(rows, inverse, weights, "rows")
    tokens, choices = inverse.shape
    out = torch.empty(tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if choose(rows.device, backend) == "torch":
        whole = rows if rest is None else torch.cat([rows, rest])
        combine_reference(whole, inverse, weights, bias, bias_ids, bias_weights, added, out)
    elif out.numel():
        block, together = _tile(rows)
        _combine_kernel[(triton.cdiv(tokens, together), triton.cdiv(rows.shape[1], block))](
            rows,
            rows if rest is None else rest,
            rows.shape[0],
            inverse,
            inverse if weights is None else weights,
            rows if bias is None else bias,
            inverse if bias_ids is None else bias_ids,
            inverse if bias_weights is None else bias_weights,
            rows if added is None else added,
            out,
            tokens,
            rows.shape[1],
            K=choices,
            WEIGHTED=weights is not None,
            BIASED=bias is not None,
            ADDED=added is not None,
            SPLIT=rest is not None,
            WHOLE=rows.shape[1] % block == 0,
            TOKENS=together,
            BLOCK=block,
            num_warps=WARPS,
        )
    return out


def weight_gradient(
    rows: torch.Tensor, inverse: torch.Tensor, gradient: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """Float32 [T, K]: the product of each place's row with its token's gradient, zero where there is none."""
    _check(rows, inverse, None, "rows")
    out = torch.empty(inverse.shape, dtype=torch.float32, device=rows.device)
    if choose(rows.device, backend) == "torch":
        at = inverse.to(torch.int64)
        product = torch.linalg.vecdot(rows[at.clamp(min=0)].float(), gradient[:, None, :].float())
        out.copy_(torch.where(at >= 0, product, 0.0))
    elif out.numel():
        _weight_gradient_kernel[(inverse.numel(),)](
            rows, inverse, gradient, out, rows.shape[1], K=inverse.shape[1], BLOCK=1024, num_warps=WARPS
        )
    return out


def _check(rows: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None, name: str) -> None:
    if rows.ndim != 2 or not rows.is_contiguous():
        raise ValueError(f"{name} of shape {tuple(rows.shape)}: expected a contiguous [rows, width]")
    if inverse.ndim != 2 or not inverse.is_contiguous():
        raise ValueError(f"inverse of shape {tuple(inverse.shape)}: expected a contiguous [tokens, K]")
    if weights is not None and (weights.shape != inverse.shape or not weights.is_contiguous()):
        raise ValueError(f"weights {tuple(weights.shape)}: expected contiguous {tuple(inverse.shape)}")


def _tile(rows: torch.Tensor, pages: Pages | None = None) -> tuple[int, int]:
    """Columns and tokens of a tile."""
    block = widest_block(rows.shape[1], 1024, rows.element_size(), pages)
    return block, max(1, ELEMENTS // block)


# --- what: the torch reference ------------------------------------------------------------------------------


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def spread_reference(
    tokens: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor
) -> None:
    token, choice = torch.nonzero(inverse >= 0, as_tuple=True)
    value = tokens[token]
    if weights is not None:
        value = (value.to(_wide(tokens.dtype)) * weights[token, choice, None].to(_wide(tokens.dtype))).to(
            tokens.dtype
        )
    out[inverse[token, choice].to(torch.int64)] = value


def combine_reference(
    rows: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    bias_ids: torch.Tensor | None,
    bias_weights: torch.Tensor | None,
    added: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    wide = _wide(rows.dtype)
    total = torch.zeros(out.shape, dtype=wide, device=rows.device) if added is None else added.to(wide)
    for k in range(inverse.shape[1]):
        here = (inverse[:, k] >= 0)[:, None]
        value = rows[inverse[:, k].clamp(min=0).to(torch.int64)].to(wide)
        if weights is not None:
            value = value * weights[:, k, None].to(wide)
        if bias is not None:
            assert bias_ids is not None
            assert bias_weights is not None
            expert = torch.where(here[:, 0], bias_ids[:, k], 0).to(torch.int64)
            value = value + bias_weights[:, k, None].to(wide) * bias[expert].to(wide)
        total = torch.where(here, total + value, total)
    out.copy_(total)


# --- how: the Triton kernels --------------------------------------------------------------------------------


@triton.jit
def _spread_kernel(
    tokens,
    inverse,
    weights,
    head,
    out,
    split,
    count,
    width,
    book,
    member,
    table,
    device_slab,
    host_slab,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    WHOLE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    SIZE: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    inside = token < count
    mask = inside[:, None]
    if not WHOLE:
        mask = mask & (column < width)[None, :]
    granted = False
    length = tl.zeros((), tl.int64)
    if PAGED:
        granted = tl.load(book + member * K_HEADER + K_STATUS) == K_GRANTED
        length = tl.load(book + member * K_HEADER + K_BYTES)
    # Masked off where the token has no place here: those rows may be garbage, and need not be read.
    any_place = tl.zeros((TOKENS,), tl.int32) - 1
    for k in tl.static_range(K):
        any_place = tl.maximum(
            any_place, tl.load(inverse + token.to(tl.int64) * K + k, mask=inside, other=-1)
        )
    value = tl.load(
        tokens + token.to(tl.int64)[:, None] * width + column[None, :],
        mask=mask & (any_place >= 0)[:, None],
        other=0.0,
    )
    for k in tl.static_range(K):
        at = token.to(tl.int64) * K + k
        row = tl.load(inverse + at, mask=inside, other=-1)
        needed = True
        scaled = value
        if WEIGHTED:
            weight = tl.load(weights + at, mask=row >= 0, other=0.0).to(tl.float32)
            scaled = (value.to(tl.float32) * weight[:, None]).to(value.dtype)
        if SPLIT:
            place = head + row.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(place, scaled, mask=mask & ((row >= 0) & (row < split))[:, None])
            row -= split
            # Past a head there are few rows or none: most tiles need not even work out where they would go.
            needed = tl.max(row, axis=0) >= 0
        if needed:
            place = out + row.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(place, scaled, mask=mask & (row >= 0)[:, None])
            if PAGED:
                if granted:
                    first = (row.to(tl.int64) * width + start) * SIZE
                    held = (book, table, length, device_slab, host_slab)
                    to = page_pointers(held, first, tl.arange(0, BLOCK), row >= 0, out, PAGE, WIDE)
                    tl.store(to, scaled, mask=mask & (row >= 0)[:, None])


@triton.jit
def _combine_kernel(
    rows,
    rest,
    split,
    inverse,
    weights,
    bias,
    bias_ids,
    bias_weights,
    added,
    out,
    count,
    width,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < count
    mask = inside[:, None]
    if not WHOLE:
        mask = mask & (column < width)[None, :]
    target = token.to(tl.int64)[:, None] * width + column[None, :]
    if ADDED:
        total = tl.load(added + target, mask=mask, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for k in tl.static_range(K):
        at = token.to(tl.int64) * K + k
        row = tl.load(inverse + at, mask=inside, other=-1)
        here = mask & (row >= 0)[:, None]
        place = rows + row.to(tl.int64)[:, None] * width + column[None, :]
        if SPLIT:
            # The address is chosen, not the value: one load.
            other = rest + (row - split).to(tl.int64)[:, None] * width + column[None, :]
            place = tl.where((row >= split)[:, None], other, place)
        value = tl.load(place, mask=here, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + at, mask=row >= 0, other=0.0).to(tl.float32)[:, None]
        if BIASED:
            expert = tl.load(bias_ids + at, mask=row >= 0, other=0).to(tl.int64)
            weight = tl.load(bias_weights + at, mask=row >= 0, other=0.0).to(tl.float32)
            shift = tl.load(bias + expert[:, None] * width + column[None, :], mask=here, other=0.0)
            value += weight[:, None] * shift.to(tl.float32)
        total += value
    tl.store(out + target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _weight_gradient_kernel(rows, inverse, gradient, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = tl.load(inverse + place).to(tl.int64)
    token = (place // K).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    start = 0
    # A place without a row has nothing to sum.
    end = tl.where(row >= 0, width, 0)
    while start < end:
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        value = tl.load(rows + row * width + column, mask=mask, other=0.0).to(tl.float32)
        total += value * tl.load(gradient + token * width + column, mask=mask, other=0.0).to(tl.float32)
        start += BLOCK
    tl.store(out + place, tl.sum(total, 0))
