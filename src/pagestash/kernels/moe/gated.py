"""The gated activation between an expert's two projections, with routing weights folded in.

R rows of capacity, N an expert's width, H = 2N. The first projection `h_RH` holds the gate in its first N columns
and the linear part in the rest. Forward makes `a_RN = act(gate) · linear · weight`. Backward needs `h_RH` alone:
from the gradient of `a_RN` it makes the gradient of `h_RH`, the weights' gradient, and `a_RN` once more, which
the second projection's weight gradient needs. So neither `a_RN` nor the second projection's output is kept.
An activation without a gate has H = N, and no linear part.

The rows may be in two buffers: the first S, which were *expected*, in `expected_SH`, and those in *excess* of
them in `h_RH`. One launch reads both.

With pages, forward writes `h_RH` to them as it reads it, and backward reads them in place: stashing `h_RH` costs
one write. Where the pool had none to give, backward takes `h_RH` from a buffer that the caller has recomputed.

What moves, a row of bf16: forward 4N read, 2N written (and 4N to pages); backward 6N read, 6N written.
"""

from functools import cache
from typing import Any

import torch

from pagestash.kernels.backend import Backend, cdiv, choose, launch, multiprocessors, power_of_two
from pagestash.kernels.moe.activation import Activation, ActivationName, as_activation
from pagestash.kernels.moe.activations import activate_reference, constants
from pagestash.kernels.moe.gated_kernels import backward_kernel, forward_kernel
from pagestash.kernels.moe.row_info import RowInfo, gate_and_linear, row_weights
from pagestash.kernels.pages.paged import (
    Pages,
    arguments,
    copy_rows,
    is_wide,
    page_bytes,
    widest_block,
)

ELEMENTS = 2048
"""Of a tile, over 4 warps: two 16-byte accesses a thread for each operand."""
WARPS = 4
PROGRAMS_PER_SM = 8


def forward(
    h_RH: torch.Tensor,
    info: RowInfo,
    activation: ActivationName | Activation = "silu",
    pages: Pages | None = None,
    *,
    expected_SH: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`a_RN` for the valid rows of `h_RH`; the rows after them stay uninitialised.

    With `expected_SH` the rows are in two buffers: that one comes first, `h_RH` and its `pages` hold the others.
    """
    act = _checked(h_RH, activation)
    split = 0 if expected_SH is None else expected_SH.shape[0]
    a_RN = torch.empty(
        split + h_RH.shape[0], h_RH.shape[1] // act.parts, dtype=h_RH.dtype, device=h_RH.device
    )
    if _backend(h_RH, info, backend) == "torch":
        count = int(info.rows)
        if pages is not None:
            copy_rows(pages, h_RH, to_pages=True)
        whole_RH = h_RH if expected_SH is None else torch.cat([expected_SH, h_RH])
        gate, linear = gate_and_linear(whole_RH[:count], info, gated=act.gated)
        value, _, linear, _, _ = activate_reference(gate, linear, act)
        a_RN[:count] = (value * linear * row_weights(info, count, value)).to(h_RH.dtype)
    elif a_RN.numel():
        operands = (h_RH, _or(expected_SH, h_RH), a_RN)
        _launch(forward_kernel, h_RH, split, operands, info, act, pages)
    return a_RN


def backward(
    h_RH: torch.Tensor,
    gradient_RN: torch.Tensor,
    info: RowInfo,
    activation: ActivationName | Activation = "silu",
    pages: Pages | None = None,
    *,
    expected_SH: torch.Tensor | None = None,
    dexpected_SH: torch.Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """From the gradient of `a_RN`: the gradient of `h_RH`, `a_RN` itself, and the weights' gradient (float32).

    With `pages` that were granted, `h_RH` is not read. `in_place` writes the first two results over `h_RH` and
    `gradient_RN`. Weights that no valid row refers to get zero. With `expected_SH`, as in `forward`, the gradient
    of its rows goes to `dexpected_SH`, which may be the same tensor.
    """
    act = _checked(h_RH, activation)
    if (expected_SH is None) != (dexpected_SH is None):
        raise ValueError("expected_SH, dexpected_SH: give both or neither; they may be one tensor")
    dh_RH, a_RN = (h_RH, gradient_RN) if in_place else (torch.empty_like(h_RH), torch.empty_like(gradient_RN))
    dweights = None
    if info.weights is not None:
        dweights = torch.zeros(info.weights.shape, dtype=torch.float32, device=h_RH.device)
    if _backend(h_RH, info, backend) == "torch":
        count = int(info.rows)
        whole_RH = h_RH[:count].clone() if expected_SH is None else torch.cat([expected_SH, h_RH])[:count]
        split = 0 if expected_SH is None else min(expected_SH.shape[0], count)
        if pages is not None:
            copy_rows(pages, whole_RH[split:], to_pages=False)
        whole_dh_RH = _backward_reference(whole_RH, gradient_RN, info, act, a_RN, dweights)
        if dexpected_SH is not None:
            dexpected_SH[:split] = whole_dh_RH[:split]
        dh_RH[: count - split] = whole_dh_RH[split:]
    elif gradient_RN.numel():
        operands = (
            h_RH,
            _or(expected_SH, h_RH),
            gradient_RN,
            dh_RH,
            _or(dexpected_SH, dh_RH),
            a_RN,
            _or(dweights, h_RH),
        )
        split = 0 if expected_SH is None else expected_SH.shape[0]
        _launch(backward_kernel, h_RH, split, operands, info, act, pages)
    return dh_RH, a_RN, dweights


def _backend(like: torch.Tensor, info: RowInfo, backend: str) -> Backend:
    """Pairs of float64 are for the reference: the kernels take a pair for one word."""
    return "torch" if info.interleaved and like.dtype == torch.float64 else choose(like.device, backend)


def _checked(h_RH: torch.Tensor, activation: ActivationName | Activation) -> Activation:
    found = as_activation(activation)
    if h_RH.ndim != 2 or h_RH.shape[1] % found.parts or not h_RH.is_contiguous():
        wanted = "[rows, 2n]" if found.gated else "[rows, n]"
        raise ValueError(f"h of shape {tuple(h_RH.shape)}: expected a contiguous {wanted}")
    return found


# --- what: the torch reference ------------------------------------------------------------------------------


def _backward_reference(
    h_RH: torch.Tensor,
    gradient_RN: torch.Tensor,
    info: RowInfo,
    activation: Activation,
    a_RN: torch.Tensor,
    dweights: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of the valid rows `h_RH`; those of the weights, and `a_RN`, are written where they belong."""
    count = h_RH.shape[0]
    gate, linear = gate_and_linear(h_RH, info, gated=activation.gated)
    act, slope, linear, passes_gate, passes_linear = activate_reference(gate, linear, activation)
    weight = row_weights(info, count, act)
    of_a = gradient_RN[:count].to(act.dtype)
    of_product = of_a * weight
    if dweights is not None:
        value = (of_a * act * linear).sum(1).float()
        at = slice(count) if info.order is None else info.order[:count].to(torch.int64)
        dweights.view(-1)[at] = value
    a_RN[:count] = (act * linear * weight).to(h_RH.dtype)
    dgate, dlinear = of_product * linear * slope * passes_gate, of_product * act * passes_linear
    if not activation.gated:
        return dgate.to(h_RH.dtype)
    if info.interleaved:
        return torch.stack([dgate, dlinear], dim=2).flatten(1).to(h_RH.dtype)
    return torch.cat([dgate, dlinear], dim=1).to(h_RH.dtype)


# --- how: the Triton kernels --------------------------------------------------------------------------------


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A pointer for a kernel that will not follow it."""
    return other if tensor is None else tensor


def _launch(
    kernel: Any,
    h_RH: torch.Tensor,
    split: int,
    operands: tuple[torch.Tensor, ...],
    info: RowInfo,
    activation: Activation,
    pages: Pages | None,
) -> None:
    """`h_RH` holds the rows after the first `split`."""
    inner = h_RH.shape[1] // activation.parts
    experts = 0 if info.bias is None else info.bias.shape[0]
    fixed = _constants(
        inner,
        h_RH.element_size(),
        activation,
        info.interleaved,
        info.weights is not None,
        info.order is not None,
        experts,
        page_bytes(pages),
        split > 0,
    )
    together = fixed["ROWS"]
    work = cdiv(h_RH.shape[0], together) + cdiv(split, together)
    if kernel is forward_kernel:
        work *= cdiv(inner, fixed["BLOCK"])
    launch(
        kernel,
        (max(1, min(work, PROGRAMS_PER_SM * multiprocessors(h_RH.device))),),
        h_RH.device,
        *operands,
        split,
        info.rows,
        _or(info.weights, h_RH),
        _or(info.order, h_RH),
        _or(info.bias, h_RH),
        _or(info.offsets, h_RH),
        experts,
        *arguments(pages, h_RH),
        **fixed,
    )


@cache
def _constants(
    inner: int,
    element_size: int,
    activation: Activation,
    interleaved: bool,
    weighted: bool,
    ordered: bool,
    experts: int,
    page: int | None,
    split: bool,
) -> dict[str, Any]:
    """What a kernel is compiled for; `page` is the bytes of a page, None without pages."""
    interleaved = interleaved and activation.gated
    step = 2 if interleaved else 1
    block = widest_block(inner, 256, element_size * step, page)
    return {
        "N": inner,
        "STEP": step,
        "HALF": (1 if interleaved else inner) if activation.gated else 0,
        **constants(activation),
        "WEIGHTED": weighted,
        "ORDERED": ordered,
        "EXPERTS": power_of_two(experts) if experts else 0,
        "PAGED": page is not None,
        "PAGE": page or 65536,
        "WIDE": is_wide(step * inner, step * block, element_size),
        "SPLIT": split,
        "ROWS": max(1, ELEMENTS // block),
        "BLOCK": block,
        "num_warps": WARPS,
    }
