"""Checks of a pool's arguments, before anything is allocated or launched; errors have the name and the value."""

from collections.abc import Sequence

import torch

from pagestash.kernels.pages.layout import ACCOUNTS, HOST_BASE
from pagestash.pages.ticket import Ticket

Rows = int | torch.Tensor | None


def count_pages(
    tier: str, pages: int | None, size: int | None, page_bytes: int, default: int | None = None
) -> int:
    if pages is not None and size is not None:
        raise ValueError(f"{tier}_pages={pages} and {tier}_bytes={size}: pass only one of the two")
    if size is not None:
        if size < 0:
            raise ValueError(f"{tier}_bytes={size}: expected 0 or more")
        pages = -(-size // page_bytes)
    if pages is None:
        pages = default
    if pages is None:
        raise ValueError(f"{tier}_pages or {tier}_bytes: pass one of them")
    if pages < 0:
        raise ValueError(f"{tier}_pages={pages}: expected 0 or more")
    check_most(f"{tier}_pages", pages)
    return pages


def check_most(name: str, pages: int) -> None:
    if pages >= HOST_BASE:
        raise ValueError(f"{name}={pages}: at most {HOST_BASE - 1}; use larger pages")


def check_rows(device: torch.device, rows: torch.Tensor) -> None:
    """Check a row count on the device: one element, on the pool's device. Its value is not read."""
    if rows.device != device:
        raise ValueError(f"rows is on {rows.device}, the pool on {device}")
    if rows.numel() != 1 or rows.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"rows has shape {tuple(rows.shape)} and dtype {rows.dtype}: expected one int32 or int64 element"
        )


def check_stash(
    device: torch.device, tensors: Sequence[torch.Tensor], rows: Rows | Sequence[Rows], account: int
) -> tuple[list[int], torch.Tensor | None]:
    """Each tensor's row count (-1: only the device knows), and the row count on the device."""
    if isinstance(tensors, torch.Tensor):
        raise ValueError("tensors: expected a sequence of tensors, got one tensor; pass [tensor]")
    if not 0 <= account < ACCOUNTS:
        raise ValueError(f"account={account}: expected 0 to {ACCOUNTS - 1}")
    each: list[Rows] = list(rows) if isinstance(rows, Sequence) else [rows] * len(tensors)
    if len(each) != len(tensors):
        raise ValueError(f"rows: {len(each)} values for {len(tensors)} tensors")
    _check_tensors(device, tensors)
    fixed: list[int] = []
    on_device: torch.Tensor | None = None
    for index, (tensor, count) in enumerate(zip(tensors, each)):
        capacity = tensor.shape[0] if tensor.ndim else 1
        if count is None:
            fixed.append(capacity)
        elif isinstance(count, torch.Tensor):
            check_rows(device, count)
            if on_device is not None and on_device is not count:
                raise ValueError("rows: at most one device tensor per call; stash in two calls")
            on_device = count
            fixed.append(-1)
        elif not hasattr(count, "__index__"):
            raise ValueError(f"rows={count!r}: expected None, an int, or a one-element integer tensor")
        elif not 0 <= count <= capacity:
            raise ValueError(f"rows={count}: tensors[{index}] has {capacity} rows")
        else:
            fixed.append(int(count))
    return fixed, on_device


def _check_tensors(device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
    """Their bytes can be copied as they lie in memory."""
    for index, tensor in enumerate(tensors):
        if tensor.device != device:
            raise ValueError(f"tensors[{index}] is on {tensor.device}, the pool on {device}")
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError(
                f"tensors[{index}] of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; "
                "pass tensor.contiguous()"
            )
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"tensors[{index}] is a lazy conjugate or negative; pass its resolve_conj().resolve_neg()"
            )


def check_tickets(pool_id: int, tickets: Sequence[Ticket], verb: str) -> Sequence[Ticket]:
    """The tickets, if all belong to this pool and are live."""
    if isinstance(tickets, Ticket):
        raise ValueError("tickets: expected a sequence of tickets, got one; pass [ticket]")
    for index, ticket in enumerate(tickets):
        if ticket.group.pool_id != pool_id:
            raise ValueError(f"tickets[{index}] belongs to another pool: cannot {verb} it here")
        if ticket.released:
            raise ValueError(f"tickets[{index}] was released before: cannot {verb} it again")
    if verb == "release" and len({id(ticket) for ticket in tickets}) != len(tickets):
        raise ValueError("tickets: the same ticket is in the list twice; a ticket is released once")
    return tickets


def check_buffers(
    device: torch.device, tickets: Sequence[Ticket], buffers: Sequence[torch.Tensor], name: str
) -> None:
    """Check what kernels rely on: one contiguous tensor per ticket, on the pool's device, of the ticket's size."""
    if len(buffers) != len(tickets):
        raise ValueError(f"{name}: {len(buffers)} tensors for {len(tickets)} tickets")
    for index, (ticket, buffer) in enumerate(zip(tickets, buffers)):
        if buffer.device != device:
            raise ValueError(f"{name}[{index}] is on {buffer.device}, the pool on {device}")
        if not buffer.is_contiguous():
            raise ValueError(
                f"{name}[{index}] of shape {tuple(buffer.shape)} and strides {buffer.stride()} "
                "is not contiguous"
            )
        if buffer.nbytes != ticket.span.max_bytes:
            raise ValueError(
                f"{name}[{index}] has {buffer.nbytes} bytes, the ticket's tensor {ticket.span.max_bytes}"
            )


def fill_pattern(fill: float | None, dtype: torch.dtype) -> int | None:
    """`fill` repeated to eight bytes in `dtype`, as the integer that kernels write over a tail."""
    if fill is None:
        return None
    if fill == 0:
        return 0
    if dtype.itemsize > 8:
        raise ValueError(f"fill={fill}: only 0 or None for {dtype}")
    try:
        return int(torch.full((8 // dtype.itemsize,), fill, dtype=dtype).view(torch.int64))
    except RuntimeError as error:
        raise ValueError(f"fill={fill}: no value of {dtype} ({error})") from None
