"""Buffers of rows: how many rows are allocated for how many that are asked for."""

import torch

ALIGNMENT = 256


def padded_rows(rows: int, alignment: int = ALIGNMENT) -> int:
    """The rows to allocate for `rows`: varying sizes then ask the allocator for the same few blocks."""
    return -(-rows // alignment) * alignment


def empty_rows(rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """An uninitialised `[rows, width]` tensor in a block of padded rows."""
    whole = padded_rows(rows)
    padded = torch.empty(whole, width, dtype=like.dtype, device=like.device)
    return padded if whole == rows else padded[:rows]
