"""Pages held by one autograd node: reserved before their bytes exist, given back when the node is done."""

import torch

from pagestash.kernels.pages.copy import copy_to_pages
from pagestash.kernels.pages.paged import Pages
from pagestash.pages.pool import PagePool


class Lease:
    """Pages for the valid rows of one tensor that a kernel will write itself.

    An *expendable* lease that gets no pages leaves the pool's overflow flag alone: its owner can recompute the
    bytes. It still counts as wanted.
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
        self.pool = pool
        self.ticket = pool.reserve(shape, dtype, rows, account=account, expendable=expendable)

    @property
    def pages(self) -> Pages:
        if self.ticket.released:
            raise RuntimeError(
                "backward asks for pages that were given back: its step ended by an exception, or it ran before "
                "without retain_graph; run forward again"
            )
        return Pages(self.pool.memory, self.ticket.span, self.ticket.member, self.ticket.group.book)

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy the valid rows of `tensor` to the pages, if these were granted and no kernel has written them."""
        ticket = self.ticket
        flat = tensor.view(-1).view(torch.uint8)
        copy_to_pages(self.pool.memory, [flat], [ticket.span], [ticket.member], ticket.group.book)

    def restore(self, *, unless: "Lease | None" = None) -> torch.Tensor:
        """The valid rows in a new buffer of the original shape; the rest of it is undefined.

        So is all of it where the lease `unless` got its pages.
        """
        (buffer,) = buffers = self.pool.buffers([self.ticket])
        status = None if unless is None else unless.pages.status
        self.pool.restore_into([self.ticket], buffers, None, unless=status)
        return buffer

    def close(self) -> None:
        """Give the pages back; a second time changes nothing."""
        if not self.ticket.released:
            self.pool.release([self.ticket])

    def __del__(self) -> None:
        # A node may die in any thread, while another stream is current: the pool releases at its next call.
        ticket = getattr(self, "ticket", None)
        if ticket is not None and not ticket.released:
            self.pool.release_later(ticket)


def pages_of(lease: Lease | None) -> Pages | None:
    return None if lease is None else lease.pages
