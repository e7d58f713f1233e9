"""Pages held by one autograd node: reserved before their bytes exist, given back when the node is done."""

import sys
from dataclasses import replace

import torch

from pagestash.kernels import copy, stash
from pagestash.kernels.paged import Pages
from pagestash.pages.pool import PagePool
from pagestash.pages.ticket import Ticket, TicketGroup, lay_out


class Lease:
    """Pages for the valid rows of one tensor that a kernel will write itself.

    An *expendable* lease that gets no pages leaves the pool's overflow flag alone: its owner can make the
    bytes again. It still counts as wanted.
    """

    def __init__(
        self,
        pool: PagePool,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: torch.Tensor,
        *,
        account: int = 0,
        expendable: bool = False,
    ) -> None:
        spans, length = lay_out([torch.empty(shape, dtype=dtype, device="meta")], pool.page_bytes)
        book = torch.empty(length, dtype=torch.int64, device=pool.device)
        memory = pool.memory
        if expendable:
            memory = replace(memory, overflow=torch.empty_like(memory.overflow))
        stash.reserve(memory, spans, [-1], rows, book, account)
        self.pool = pool
        self.ticket = Ticket(TicketGroup(pool._id, book, spans, account), 0, torch.Size(shape), dtype)
        pool._live += 1

    @property
    def pages(self) -> Pages:
        return Pages(self.pool.memory, self.ticket.span, self.ticket.member, self.ticket.group.book)

    def write(self, buffer: torch.Tensor) -> None:
        """Copy the valid rows of `buffer` into the pages."""
        ticket = self.ticket
        flat = buffer.detach().reshape(-1).view(torch.uint8)
        copy.copy_to_pages(self.pool.memory, [flat], [ticket.span], [ticket.member], ticket.group.book)

    def restore(self) -> torch.Tensor:
        """The valid rows in a new buffer of the original shape; the rest of it is undefined."""
        return self.pool.restore([self.ticket], fill=None)[0]

    def close(self) -> None:
        """Give the pages back; a second time changes nothing."""
        if not self.ticket.released:
            self.pool.release([self.ticket])

    def __del__(self) -> None:
        if hasattr(self, "ticket") and not sys.is_finalizing():
            self.close()


def graph_is_kept() -> bool:
    """Inside backward: whether it may run again (`retain_graph`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
