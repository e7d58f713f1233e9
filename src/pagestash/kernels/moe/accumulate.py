"""Add a grouped product of rows to matrices that hold one already.

`out_EMN[e] += a_RM[rows of e].T @ b_RN[rows of e]`: the weight gradient of rows that are in a second buffer. E
experts, R rows. A grouped product of its own would write all matrices, with zeros for experts that have no row
there, and adding it would read and write them again: 1.9 GB for 8 experts of 4096 x 7168, where usually no row is
in that buffer at all.

What moves: the rows of each expert that has any, and its matrix once in and once out.
"""

import torch

from pagestash.kernels.backend import described_tensor, launch, multiprocessors, sum_dtype, tl, triton
from pagestash.kernels.moe.dots import dot_backend, load_tile, rows_of_experts

BLOCK_M = 128
BLOCK_N = 256
BLOCK_ROWS = 64
"""On an H200, 6,500 rows into matrices of 4096 x 7168: 650 TFLOP/s; with 256 x 128 as many, with pointers 497."""
WARPS = 8
STAGES = 3


def accumulate_(
    out_EMN: torch.Tensor,
    a_RM: torch.Tensor,
    b_RN: torch.Tensor,
    offsets_E: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """`out_EMN` plus the products of each expert's rows of `a_RM` and `b_RN`, in place.

    `offsets_E` (int32, on the device) says where each expert's rows end; those after the last are not read.
    Sums are made in float32 (float64 for that) and rounded once.
    """
    if out_EMN.shape != (offsets_E.numel(), a_RM.shape[1], b_RN.shape[1]) or a_RM.shape[0] != b_RN.shape[0]:
        raise ValueError(
            f"out {tuple(out_EMN.shape)}, a {tuple(a_RM.shape)}, b {tuple(b_RN.shape)}, "
            f"{offsets_E.numel()} experts: expected [E, m, n], [R, m], [R, n]"
        )
    if not (out_EMN.is_contiguous() and a_RM.is_contiguous() and b_RN.is_contiguous()):
        raise ValueError("out, a and b: expected contiguous tensors")
    if dot_backend(out_EMN, backend) == "torch":
        accumulate_reference(out_EMN, a_RM, b_RN, offsets_E)
    elif out_EMN.numel() and a_RM.shape[0]:
        described = all(_can_describe(each) for each in (a_RM, b_RN))
        launch(
            _accumulate_kernel,
            (multiprocessors(out_EMN.device),),
            out_EMN.device,
            out_EMN,
            a_RM,
            b_RN,
            described_tensor(a_RM, [BLOCK_ROWS, BLOCK_M]) if described else a_RM,
            described_tensor(b_RN, [BLOCK_ROWS, BLOCK_N]) if described else b_RN,
            offsets_E,
            a_RM.shape[1],
            b_RN.shape[1],
            E=offsets_E.numel(),
            DESCRIBED=described,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_ROWS=BLOCK_ROWS,
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return out_EMN


def _can_describe(rows: torch.Tensor) -> bool:
    """Whether the copy engine of a multiprocessor (TMA) can read tiles of `rows`: all begin at 16 bytes."""
    in_16 = rows.data_ptr() % 16 == 0 and rows.shape[1] * rows.element_size() % 16 == 0
    return rows.is_cuda and rows.element_size() == 2 and in_16


def accumulate_reference(
    out_EMN: torch.Tensor, a_RM: torch.Tensor, b_RN: torch.Tensor, offsets_E: torch.Tensor
) -> None:
    wide = sum_dtype(out_EMN.dtype)
    for expert, rows in rows_of_experts(offsets_E):
        product = a_RM[rows].t().to(wide) @ b_RN[rows].to(wide)
        out_EMN[expert] = (out_EMN[expert].to(wide) + product).to(out_EMN.dtype)


@triton.jit
def _accumulate_kernel(
    out,
    a,
    b,
    a_tiles,
    b_tiles,
    offsets,
    m,
    n,
    E: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    across = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * across
    start = tl.zeros((), tl.int32)
    # Tiles are counted through all experts that have rows here: the next one's begin where this one's end.
    tile = tl.program_id(0)
    # Mostly no expert has any: the loop then costs one load each, and all are in one line.
    for expert in range(E):
        end = tl.load(offsets + expert)
        if end > start:
            while tile < tiles:
                first_m = tile // across * BLOCK_M
                first_n = tile % across * BLOCK_N
                at_m = first_m + tl.arange(0, BLOCK_M)
                at_n = first_n + tl.arange(0, BLOCK_N)
                in_m = at_m < m
                in_n = at_n < n
                total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                whole = start
                if DESCRIBED:
                    whole += (end - start) // BLOCK_ROWS * BLOCK_ROWS
                    for first in range(start, whole, BLOCK_ROWS):
                        left = a_tiles.load([first, first_m])
                        right = b_tiles.load([first, first_n])
                        total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
                for first in range(whole, end, BLOCK_ROWS):
                    row = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
                    inside = row < end
                    # Rows past the end belong to another expert: both operands become zero.
                    left = load_tile(a, row, at_m, m, 1, inside, in_m)
                    right = load_tile(b, row, at_n, n, 1, inside, in_n)
                    total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
                matrix = (tl.zeros((), tl.int64) + expert) * m * n
                place = out + matrix + at_m.to(tl.int64)[:, None] * n + at_n[None, :]
                mask = in_m[:, None] & in_n[None, :]
                total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
                tl.store(place, total.to(out.dtype.element_ty), mask=mask)
                tile += tl.num_programs(0)
            tile -= tiles
        start = end
