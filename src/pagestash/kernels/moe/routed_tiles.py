"""What `permute` and `combine` share: checks of their operands, and the tiles that they go through tokens in."""

from functools import cache
from typing import NamedTuple

import torch

from pagestash.kernels.backend import cdiv
from pagestash.kernels.pages.paged import is_wide, widest_block

COLUMNS = 1024
"""The most of a tile, which then has one token: a choice without a row is branched over, not masked off."""
ELEMENTS = 4096
"""Of a tile of fewer columns."""


def check_operands(
    rows_RD: torch.Tensor, inverse_TK: torch.Tensor, weights_TK: torch.Tensor | None, name: str
) -> None:
    """The kernels take them as contiguous."""
    if rows_RD.ndim != 2 or not rows_RD.is_contiguous():
        raise ValueError(f"{name} of shape {tuple(rows_RD.shape)}: expected a contiguous [rows, width]")
    if inverse_TK.ndim != 2 or not inverse_TK.is_contiguous():
        raise ValueError(f"inverse of shape {tuple(inverse_TK.shape)}: expected a contiguous [tokens, K]")
    if weights_TK is not None and (weights_TK.shape != inverse_TK.shape or not weights_TK.is_contiguous()):
        raise ValueError(f"weights {tuple(weights_TK.shape)}: expected contiguous {tuple(inverse_TK.shape)}")


class Tile(NamedTuple):
    block: int
    """Its columns."""
    together: int
    """Its tokens."""
    across: int
    """Tiles side by side in a row."""
    whole: bool
    """Whether they make up the row exactly."""
    wide: bool
    """Whether each begins at a multiple of 16 bytes."""
    within: bool
    """Whether each lies in one page."""
    warps: int


@cache
def tile_of(width: int, element_size: int, page: int | None = None) -> Tile:
    """The tile for rows of `width` elements, which go to pages of `page` bytes, if given."""
    block = widest_block(width, COLUMNS, element_size, page)
    whole = width % block == 0
    return Tile(
        block,
        1 if block == COLUMNS else max(1, ELEMENTS // block),
        cdiv(width, block),
        whole,
        is_wide(width, block, element_size),
        page is not None and whole and page % (block * element_size) == 0,
        2 if block == COLUMNS else 4,
    )
