"""Rows in eight bits, coded by the kernels that write them and read where they wait.

R rows of capacity, of which the first S were *expected* and the others are in *excess*. A row has P parts of N
values: the first projection two, its gate and its linear part, and a row off the wire one, of D values. Its codes
are C bytes:

    P · N codes, part after part;  P · B scales, one for each block of 128 values of a part;  padding to 16

If N is a multiple of 128, these are the bytes of `encode` for a row of P · N values. The codes themselves, and
their error, are those of `kernels/pages/eight_bits.py`. Rows past the valid ones are neither written nor read.

The codes of expected rows are in a buffer that waits, those of excess rows in pages, or in a buffer, too.
"""

from dataclasses import dataclass
from typing import Any

import torch

from pagestash.kernels.backend import cdiv
from pagestash.kernels.pages.eight_bits import (
    BLOCK,
    FLOOR,
    CodeShape,
    converts,
    decode_reference,
    encode_reference,
)
from pagestash.kernels.pages.paged import Pages, copy_rows


@dataclass(frozen=True, slots=True)
class CodeRow:
    """How one row is coded: so many parts, of so many values."""

    parts: int
    width: int

    @property
    def blocks(self) -> int:
        """Of one part."""
        return cdiv(self.width, BLOCK)

    @property
    def bytes(self) -> int:
        return cdiv(self.parts * (self.width + self.blocks), 16) * 16


@dataclass(frozen=True, slots=True)
class RowCodes:
    """Where the codes of one tensor's rows are."""

    row: CodeRow
    expected_SC: torch.Tensor | None
    excess_RC: torch.Tensor | None
    """None where they are in `pages`, or there are none."""
    pages: Pages | None

    @property
    def split(self) -> int:
        """Expected rows."""
        return 0 if self.expected_SC is None else self.expected_SC.shape[0]

    def pointers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of expected and excess rows, for a kernel; any bytes where there are none."""
        excess = self.excess_RC if self.pages is None else self.pages.memory.device_slab
        first, second = self.expected_SC, excess
        if first is None or second is None:
            first = second = first if second is None else second
        assert first is not None
        assert second is not None
        return first, second

    def constants(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """What a kernel that writes or reads the codes is compiled for, besides pages and the split."""
        return {
            "PARTS": self.row.parts,
            "ROW": self.row.bytes,
            "FLOOR": FLOOR[dtype],
            "FP8": converts(device),
            "CODE_WIDE": self.row.width % 16 == 0,
        }


# --- what: the torch reference ------------------------------------------------------------------------------


def encode_rows_reference(x_RPN: torch.Tensor, row: CodeRow) -> torch.Tensor:
    """Codes [R, C] of rows [R, P, N], or of rows of one part [R, N]."""
    count, P, N, B = x_RPN.shape[0], row.parts, row.width, row.blocks
    out_RC = torch.zeros(count, row.bytes, dtype=torch.uint8, device=x_RPN.device)
    if count:
        shape = CodeShape(count * P * N, count * P, N)
        coded = encode_reference(x_RPN.reshape(-1), shape).view(count, P, -1)
        out_RC[:, : P * N] = coded[..., :N].flatten(1)
        out_RC[:, P * N : P * (N + B)] = coded[..., B * BLOCK : B * BLOCK + B].flatten(1)
    return out_RC


def decode_rows_reference(codes_RC: torch.Tensor, row: CodeRow, dtype: torch.dtype) -> torch.Tensor:
    """The rows [R, P · N], part after part."""
    count, P, N, B = codes_RC.shape[0], row.parts, row.width, row.blocks
    if not count:
        return torch.empty(0, P * N, dtype=dtype, device=codes_RC.device)
    shape = CodeShape(count * P * N, count * P, N)
    coded = torch.zeros(count, P, shape.row_bytes, dtype=torch.uint8, device=codes_RC.device)
    coded[..., :N] = codes_RC[:, : P * N].view(count, P, N)
    coded[..., B * BLOCK : B * BLOCK + B] = codes_RC[:, P * N : P * (N + B)].view(count, P, B)
    return decode_reference(coded.flatten(0, 1), shape, dtype).view(count, P * N)


def put_reference(codes_VC: torch.Tensor, at_V: torch.Tensor, codes: RowCodes) -> None:
    """Put the codes of the rows `at_V` where they wait."""
    early = at_V < codes.split
    if codes.expected_SC is not None:
        codes.expected_SC[at_V[early]] = codes_VC[early]
    beyond_V, beyond_VC = at_V[~early] - codes.split, codes_VC[~early]
    if codes.pages is not None:
        whole_RC = codes_VC.new_zeros(codes.pages.span.capacity, codes.row.bytes)
        whole_RC[beyond_V] = beyond_VC
        copy_rows(codes.pages, whole_RC, to_pages=True)
    elif codes.excess_RC is not None:
        codes.excess_RC[beyond_V] = beyond_VC


def get_reference(codes: RowCodes, count: int) -> torch.Tensor:
    """The codes [count, C] of the first rows; zeros where pages were refused."""
    parts = [] if codes.expected_SC is None else [codes.expected_SC[:count]]
    left = count - sum(map(len, parts))
    if codes.pages is not None:
        beyond = torch.zeros(
            codes.pages.span.capacity, codes.row.bytes, dtype=torch.uint8, device=codes.pages.book.device
        )
        copy_rows(codes.pages, beyond, to_pages=False)
        parts.append(beyond[:left])
    elif codes.excess_RC is not None:
        parts.append(codes.excess_RC[:left])
    return torch.cat(parts)
