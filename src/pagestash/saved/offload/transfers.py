"""Copies of groups to pinned host memory and back, on two streams beside compute.

One stream for each direction: out during forward, in during backward. The hand-overs, and why each is safe:

- *compute to out*: the out stream waits for the compute stream's present, so a source is complete when it is read.
- *source to allocator*: a source is let go only after its copy is done, or after the compute stream was told to
  wait for it; memory that the allocator hands on is then written behind the copy.
- *out to in*: a copy back waits for the event of its own copy out.
- *compute to in*: a copy back waits for the compute stream's present, which may still use the memory that its
  buffer is made of.
- *in to compute*: whoever asks for a tensor makes the compute stream wait for the event of its copy back.
- *host memory to its next tensor*: a block is given back only after the compute stream was told to wait for the
  copy back that reads it; the next copy out waits for the compute stream, and follows all copies out before it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pagestash.pages.copies import copy_each
from pagestash.pages.slabs import HostBlock
from pagestash.saved.homes import Held
from pagestash.saved.offload.window import WindowGroup
from pagestash.saved.stash import StashPlace
from pagestash.saved.storage import Entry
from pagestash.saved.streams import SideStream, is_done, wait_here


class Member:
    """What became of one entry of a group.

    It stays as a whole (`stays`); or its first `share` bytes are in a block of host memory, and the rows behind
    them, where it has valid rows, in pages (`rest`).
    """

    # (Defaults of the class: one is made for every tensor that leaves, and mostly has nothing but a block.)
    refused: int = 0
    """Bytes for which there was no host memory."""
    rest: Entry | None = None
    rest_place: StashPlace | None = None
    stays: Held | None = None
    rows: torch.Tensor | None = None

    def __init__(self, share: int = 0, block: HostBlock | None = None) -> None:
        self.share = share
        self.block = block

    @property
    def pieces(self) -> Sequence[torch.Tensor]:
        """The host memory of its `share` bytes."""
        return () if self.block is None else self.block.pieces

    def in_form_of(self, entry: Entry) -> torch.Tensor | None:
        """The host memory in the form of the whole entry, which costs less to copy than to see it as bytes.

        None if only a part of it leaves, or it has no form, or the block cannot have that.
        """
        form, block = entry.form, self.block
        if form is None or block is None or self.share != entry.last - entry.first:
            return None
        try:
            return block.forms[form]
        except KeyError:
            return block.in_form(form)


class GroupOwner(Protocol):
    """Who answers for the entries of a group."""

    def get(self, group: "OffloadedGroup", entry: Entry) -> torch.Tensor: ...

    def drop(self, group: "OffloadedGroup", entry: Entry) -> None: ...

    def ended(self, group: "OffloadedGroup") -> None: ...


@dataclass(slots=True, eq=False)
class OffloadedGroup:
    """The entries of one region in one microbatch, on their way out, on the host, and on their way back.

    It is the place of each of them, whatever became of it.
    """

    owner: GroupOwner | None = field(repr=False)
    """None once all entries are dropped: the owner knows its groups, and a circle would keep pinned memory."""
    held: WindowGroup
    """Its bytes, as the window sees them."""
    alive: int = 0
    """Entries that were not dropped yet."""
    members: dict[Entry, Member] = field(default_factory=dict)
    sources: list[tuple[Entry, torch.Tensor]] = field(default_factory=list)
    """The memory that its copies out read, until it is let go."""
    left: torch.cuda.Event | None = None
    incoming: dict[Entry, torch.Tensor] = field(default_factory=dict)
    arrived: torch.cuda.Event | None = None
    restored: dict[Entry, torch.Tensor] = field(default_factory=dict)

    def get(self, entry: Entry) -> torch.Tensor:
        assert self.owner is not None
        return self.owner.get(self, entry)

    def drop(self, entry: Entry) -> None:
        assert self.owner is not None
        entry.place = None
        self.owner.drop(self, entry)
        self.alive -= 1
        if not self.alive:
            self.owner.ended(self)
            self.owner = None


class Transfers:
    """The copies that are under way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = SideStream(device)
        self._in = SideStream(device)
        self._leaving: deque[OffloadedGroup] = deque()

    def move_out(self, group: OffloadedGroup, entries: Sequence[Entry]) -> None:
        """Start to copy the leading bytes of `entries` to their blocks."""
        sources, leaving_bytes = [], 0
        origins: list[torch.Tensor] = []
        hosts: list[torch.Tensor] = []
        in_parts: list[tuple[Entry, Member]] = []
        members = group.members
        for entry in entries:
            member, origin = members[entry], entry.origin
            assert origin is not None
            host = member.in_form_of(entry)
            if host is not None:
                hosts.append(host)
                origins.append(origin)
            else:
                in_parts.append((entry, member))
            sources.append((entry, origin))
            leaving_bytes += entry.storage_bytes or origin.untyped_storage().nbytes()
        with self._out.after():
            if hosts:
                copy_each(hosts, origins, self._device)
            for entry, member in in_parts:
                self._copy_parts(entry, member.pieces)
        group.left = self._out.mark()
        group.sources = sources
        group.held.leaving_bytes = leaving_bytes
        self._leaving.append(group)

    def _copy_parts(self, entry: Entry, pieces: Sequence[torch.Tensor]) -> None:
        start = 0
        for piece in pieces:
            size = piece.numel()
            piece.copy_(entry.part(start, size), non_blocking=True)
            start += size

    def oldest_has_left(self) -> bool:
        """Whether the oldest copy out is known to be over."""
        return bool(self._leaving) and is_done(self._leaving[0].left)

    def let_go(self, *, over: bool = False) -> None:
        """Let go of the sources of the oldest copy out; `over`: it is known to be.

        The allocator gives freed memory to the next operation of the compute stream, which is therefore told to
        wait for the copy, unless that is over.
        """
        group = self._leaving.popleft()
        if not (over or is_done(group.left)):
            wait_here(group.left)
        for entry, origin in group.sources:
            # Written over while the copy may have been reading it.
            entry.spoiled |= origin._version != entry.version
        group.sources = []

    def fetch(self, group: OffloadedGroup, entries: Sequence[Entry]) -> None:
        """Start to copy what of `entries` has left to new memory of their full length."""
        buffers: dict[Entry, torch.Tensor] = {}
        parts: list[torch.Tensor] = []
        hosts: list[torch.Tensor] = []
        device, members = self._device, group.members
        for entry in entries:
            member, form = members[entry], entry.form
            host = member.in_form_of(entry)
            if host is not None and form is not None:  # as almost always
                dtype, size, stride, _ = form
                buffer = torch.empty_strided(size, stride, dtype=dtype, device=device)
                buffers[entry] = buffer
                parts.append(buffer)
                hosts.append(host)
                continue
            buffer = torch.empty(entry.last - entry.first, dtype=torch.uint8, device=device)
            buffers[entry] = buffer
            start = 0
            for piece in member.pieces:
                end = start + piece.numel()
                parts.append(buffer[start:end])
                hosts.append(piece)
                start = end
        with self._in.after(group.left):
            if parts:
                copy_each(parts, hosts, self._device)
        group.arrived = self._in.mark()
        group.incoming |= buffers

    def wait_for(self, group: OffloadedGroup) -> None:
        """The compute stream goes on behind the group's copy back."""
        wait_here(group.arrived)

    def forget(self, group: OffloadedGroup) -> None:
        """Nothing of the group can be asked for any more; its copy out may still be under way."""
        self._in.forget(group.arrived)
        if not group.held.leaving_bytes:  # else `let_go` is still to ask for its event
            self._out.forget(group.left)
            group.left = None
        group.arrived = None

    def outlive(self, group: OffloadedGroup) -> None:
        """The group's copy back may still be under way when its buffers are freed."""
        self._in.outlive(list(group.incoming.values()))

    def join(self) -> None:
        """The compute stream goes on behind all copies."""
        self._out.join()
        self._in.join()
