"""The products by quack (Tri Dao's kernels in NVIDIA's CuTe DSL), which gather rows and gate in the epilogue.

A kernel is compiled at its first call, for seconds; quack keeps it on disk for the next process. quack's product
is `D [m, n] = A [m, k] · B [n, k]ᵀ`; `cu_seqlens_m` bounds the rows of each matrix `B[e]`, `cu_seqlens_k` those
that each `D[e]` sums over; `A_idx` gathers rows of `A`. An operand in `concat_layout`, whose gates all come first,
is taken in pairs, or written from pairs.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from quack.epilogue.library import linear_act_mod
from quack.gemm import gemm

from pagestash.kernels.backend import on_device
from pagestash.kernels.gemm.rows import Rows, TokenRows
from pagestash.kernels.gemm.tiles import Product, Tile, tile_for

log = logging.getLogger("pagestash")

Choice = Callable[..., Tile | None]


class QuackProducts:
    """See `Products`. Tensors are bf16, with rows of multiples of 16 bytes."""

    name = "quack"

    def __init__(self, tile_for: Choice = tile_for) -> None:
        self._tile_for = tile_for

    def gates(self, rows: int, up_EHD: torch.Tensor) -> bool:
        # (What is taken in pairs is the side that is not contiguous.)
        plain = up_EHD.stride(2) == 1 and up_EHD.shape[1] % 32 == 0
        return plain and self._tile_for("up_gated", rows, *up_EHD.shape) is not None

    def up_gated(
        self, x: Rows, up_EHD: torch.Tensor, bounds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, gather = _operand(x)
        count, columns = x.shape[0], up_EHD.shape[1]
        tile = self._tile_for("up_gated", count, *up_EHD.shape)
        assert tile is not None, "not asked of `gates`"
        h_RH, a_RN = rows.new_empty(count, columns), rows.new_empty(count, columns // 2)
        if count:
            with on_device(rows.device):
                _gated_epilogue().gemm(
                    rows,
                    up_EHD,
                    h_RH,
                    epi_args={"mAuxOut": a_RN},
                    cu_seqlens_m=_aligned(bounds),
                    A_idx=gather,
                    concat_layout=("B",),
                    **_tiling(tile),
                )
        return h_RH, a_RN

    def forward(self, rows: Rows, weight_EOI: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        return self._rows_product("forward", rows, weight_EOI, bounds, ())

    def input_gradient(
        self, dy: Rows, weight_EOI: torch.Tensor, bounds: torch.Tensor, *, paired: bool = False
    ) -> torch.Tensor:
        return self._rows_product("gradient", dy, weight_EOI.mT, bounds, ("B",) if paired else ())

    def weight_gradient(
        self, dy: Rows, x: Rows, bounds: torch.Tensor, *, paired: bool = False, turned: bool = False
    ) -> torch.Tensor:
        experts = bounds.numel() - 1
        (count, columns), (_, width) = dy.shape, x.shape
        stored = (experts, width, columns) if turned else (experts, columns, width)
        dweight_EOI = torch.empty(stored, dtype=torch.bfloat16, device=bounds.device)
        if turned:
            dweight_EOI = dweight_EOI.mT
        if not count:
            return dweight_EOI.zero_()
        left, right, out = dy, x, dweight_EOI
        if isinstance(x, TokenRows):  # only the left operand can be gathered
            left, right, out = x, dy, dweight_EOI.mT
        rows, gather = _operand(left)
        assert isinstance(right, torch.Tensor)
        tile = self._tile_for(
            "weights" if gather is None else "gathered_weights", count, experts, columns, width
        )
        concat = ("out",) if paired else ()
        _gemm(tile, rows.t(), right.t(), out, concat, cu_seqlens_k=_aligned(bounds), A_idx=gather)
        return dweight_EOI

    def _rows_product(
        self,
        product: Product,
        rows: Rows,
        matrix_EOI: torch.Tensor,
        bounds: torch.Tensor,
        concat: tuple[str, ...],
    ) -> torch.Tensor:
        left, gather = _operand(rows)
        count, (experts, columns, width) = rows.shape[0], matrix_EOI.shape
        out_RO = left.new_empty(count, columns)
        if out_RO.numel():
            tile = self._tile_for(product if gather is None else "gathered", count, experts, columns, width)
            _gemm(tile, left, matrix_EOI, out_RO, concat, cu_seqlens_m=_aligned(bounds), A_idx=gather)
        return out_RO


def _gemm(
    tile: Tile | None,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    concat: tuple[str, ...],
    **rows: Any,
) -> None:
    assert tile is not None
    _say_once()
    with on_device(a.device):
        gemm(a, b, out, None, None, concat_layout=concat, **rows, **_tiling(tile))


@cache
def _tiling(tile: Tile) -> dict[str, Any]:
    return {
        "tile_M": tile.m,
        "tile_N": tile.n,
        "cluster_M": tile.cluster_m,
        "cluster_N": tile.cluster_n,
        "pingpong": tile.pingpong,
    }


@cache
def _gated_epilogue() -> Any:
    return linear_act_mod("swiglu", gated=True, has_c=False, has_rowvec=False, has_colvec=False)


@cache
def _say_once() -> None:
    log.info(
        "experts are multiplied by quack; each of its kernels is compiled at its first call, for seconds"
    )


def _operand(rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is in memory, and which row of it each row is."""
    return (rows, None) if isinstance(rows, torch.Tensor) else (rows.tokens_TD, rows.token_R)


def _aligned(bounds: torch.Tensor) -> torch.Tensor:
    """The kernels read them 16 bytes at a time."""
    return bounds.clone() if bounds.data_ptr() % 16 else bounds
