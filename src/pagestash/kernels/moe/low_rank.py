"""Add a grouped product of a small inner dimension to rows, in place: the second half of a low-rank update.

`out_RM[rows of e] += left_RK[rows of e] @ right_EKM[e]`, with E experts, R rows, and K the rank. A grouped product
of its own would write R·M values, and the sum would read both and write one: four passes over memory where this
makes two.

A tile of the result is one program's. It goes through the experts that have rows in it, one or two of them for the
most part, so each value is read and written once, and rounded once. Rows after the last end are not touched.
"""

import torch

from pagestash.kernels.backend import cdiv, launch, power_of_two, sum_dtype, tl, triton
from pagestash.kernels.moe.dots import dot_backend, load_tile, rows_of_experts

BLOCK_R = 128
BLOCK_M = 128
BLOCK_K = 64
"""The widest slice of the rank that is multiplied at once."""


def add_product_(
    out_RM: torch.Tensor,
    left_RK: torch.Tensor,
    right_EKM: torch.Tensor,
    ends_E: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """`out_RM` plus each expert's rows of `left_RK` times its matrix, in place.

    `ends_E` (int32, on the device) says where each expert's rows end. `right_EKM` may have any strides. Sums are
    made in float32 (float64 for that).
    """
    (rows, columns), (experts, rank, _) = out_RM.shape, right_EKM.shape
    if left_RK.shape != (rows, rank) or right_EKM.shape[2] != columns or ends_E.numel() != experts:
        raise ValueError(
            f"out {tuple(out_RM.shape)}, left {tuple(left_RK.shape)}, right {tuple(right_EKM.shape)}, "
            f"{ends_E.numel()} experts: expected [R, m], [R, k], [E, k, m]"
        )
    if not (out_RM.is_contiguous() and left_RK.is_contiguous()):
        raise ValueError("out and left: expected contiguous tensors")
    if dot_backend(out_RM, backend) == "torch":
        add_product_reference_(out_RM, left_RK, right_EKM, ends_E)
    elif out_RM.numel():
        grid = (cdiv(rows, BLOCK_R), cdiv(columns, BLOCK_M))
        launch(
            _add_kernel,
            grid,
            out_RM.device,
            out_RM,
            left_RK,
            right_EKM,
            ends_E,
            columns,
            *right_EKM.stride(),
            E=experts,
            EXPERTS=power_of_two(experts),
            RANK=rank,
            BLOCK_R=BLOCK_R,
            BLOCK_M=BLOCK_M,
            BLOCK_K=min(BLOCK_K, max(16, power_of_two(rank))),
            num_warps=8,
        )
    return out_RM


def add_product_reference_(
    out_RM: torch.Tensor, left_RK: torch.Tensor, right_EKM: torch.Tensor, ends_E: torch.Tensor
) -> None:
    wide = sum_dtype(out_RM.dtype)
    for expert, rows in rows_of_experts(ends_E):
        product = left_RK[rows].to(wide) @ right_EKM[expert].to(wide)
        out_RM[rows] = (out_RM[rows].to(wide) + product).to(out_RM.dtype)


@triton.jit
def _add_kernel(
    out,
    left,
    right,
    ends,
    columns,
    expert_stride,
    rank_stride,
    column_stride,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    top = tl.program_id(0) * BLOCK_R
    expert_at = tl.arange(0, EXPERTS)
    end_of = tl.load(ends + expert_at, mask=expert_at < E, other=2147483647)
    valid = tl.load(ends + E - 1)
    bottom = tl.minimum(top + BLOCK_R, valid)
    # The experts of this tile's rows: those that end after its first row and begin before its last.
    first = tl.sum((end_of <= top).to(tl.int32))
    last = tl.sum((end_of < bottom).to(tl.int32))
    if top < valid:
        row = top + tl.arange(0, BLOCK_R)
        at = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = at < columns
        place = out + row.to(tl.int64)[:, None] * columns + at[None, :]
        mask = (row < valid)[:, None] & inside[None, :]
        total = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        start = tl.load(ends + first - 1, mask=first > 0, other=0)
        for expert in range(first, last + 1):
            end = tl.load(ends + expert)
            own = (row >= start) & (row < end)
            matrix = right + (tl.zeros((), tl.int64) + expert) * expert_stride
            for before in tl.static_range(0, RANK, BLOCK_K):
                k = before + tl.arange(0, BLOCK_K)
                # Rows of other experts become zero.
                a = load_tile(left, row.to(tl.int64), k, RANK, 1, own, k < RANK)
                b = load_tile(matrix, k, at, rank_stride, column_stride, k < RANK, inside)
                total = tl.dot(a, b, total, input_precision="ieee")
            start = end
        tl.store(place, total.to(out.dtype.element_ty), mask=mask)
