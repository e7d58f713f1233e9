"""Copies of groups to pinned host memory and back, on two streams beside compute.

One stream for each direction: out during forward, in during backward. The hand-overs, and why each is safe:

- *compute to out*: the out stream waits for the compute stream's present, so a source is complete when it is read.
- *source to allocator*: a source is let go only after its copy is done, or after the compute stream was told to
  wait for it; memory that the allocator hands on is then written behind the copy.
- *out to in*: a copy back waits for the event of its own copy out.
- *compute to in*: a copy back waits for the compute stream's present, which may still use the memory that its
  buffer is made of.
- *in to compute*: whoever asks for a tensor makes the compute stream wait for the event of its copy back.
- *host memory to its next group*: an extent is given back only after the compute stream was told to wait for the
  copy back that reads it; the next copy out waits for the compute stream, and follows all copies out before it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagestash.pages.copies import copy_each
from pagestash.pages.slabs import HostSlabs
from pagestash.saved.home import KeptStorage
from pagestash.saved.offload.window import WindowGroup
from pagestash.saved.stash import StashPlace
from pagestash.saved.storage import Entry
from pagestash.saved.streams import SideStream, capturing, is_done, wait_here


@dataclass(slots=True, eq=False)
class Member:
    """What became of one entry of a group.

    It stays as a whole (`stays`); or its first `share` bytes are on the host, and the rows behind them, where it
    has valid rows, in pages (`rest`).
    """

    share: int
    host: torch.Tensor | None = None
    """Where its share is: `whole`, in the entry's form, which is cheaper than to see it as bytes, or flat."""
    whole: bool = False
    stays: KeptStorage | None = None
    rows: torch.Tensor | None = None
    rest: Entry | None = None
    rest_place: StashPlace | None = None


@dataclass(slots=True, eq=False)
class TravellingGroup:
    """The entries of one region in one microbatch, on their way out, on the host, and on their way back."""

    held: WindowGroup
    """Its bytes, as the window sees them."""
    members: dict[Entry, Member] = field(default_factory=dict)
    slabs: HostSlabs | None = None
    """Whose memory its host memory is; None: ordinary memory, for whose copies the host waits."""
    sources: list[tuple[Entry, torch.Tensor]] = field(default_factory=list)
    """The memory that its copies out read, until it is let go."""
    left: torch.cuda.Event | None = None
    incoming: dict[Entry, torch.Tensor] = field(default_factory=dict)
    arrived: torch.cuda.Event | None = None


class Transfers:
    """The copies that are under way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = SideStream(device)
        self._in = SideStream(device)
        self._leaving: deque[TravellingGroup] = deque()

    def move_out(self, group: TravellingGroup, entries: Sequence[Entry]) -> None:
        """Start to copy the leading bytes of `entries` to the host."""
        sources, leaving_bytes = [], 0
        origins: list[torch.Tensor] = []
        hosts: list[torch.Tensor] = []
        for entry in entries:
            origin, member = entry.origin, group.members[entry]
            assert origin is not None
            assert member.host is not None
            hosts.append(member.host)
            origins.append(origin if member.whole else entry.part(0, member.share))
            sources.append((entry, origin))
            leaving_bytes += entry.storage_bytes or origin.untyped_storage().nbytes()
        if group.slabs is not None:
            group.slabs.fixed = group.slabs.fixed or capturing()
        with self._out.after():
            copy_each(hosts, origins, self._device, wait=group.slabs is None)
        group.left = self._out.mark()
        group.sources = sources
        group.held.leaving_bytes = leaving_bytes
        self._leaving.append(group)

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

    def fetch(self, group: TravellingGroup, entries: Sequence[Entry]) -> None:
        """Start to copy what of `entries` has left to new memory of their full length."""
        buffers: dict[Entry, torch.Tensor] = {}
        parts: list[torch.Tensor] = []
        hosts: list[torch.Tensor] = []
        for entry in entries:
            member, form = group.members[entry], entry.form
            if member.whole and form is not None:
                buffer = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device=self._device)
            else:
                buffer = torch.empty(entry.last - entry.first, dtype=torch.uint8, device=self._device)
            buffers[entry] = buffer
            if member.host is not None:  # else all of its valid rows are in pages
                hosts.append(member.host)
                parts.append(buffer if member.whole else buffer[: member.share])
        with self._in.after(group.left):
            if parts:
                copy_each(parts, hosts, self._device, wait=group.slabs is None)
        group.arrived = self._in.mark()
        group.incoming |= buffers

    def wait_for(self, group: TravellingGroup) -> None:
        """The compute stream goes on behind the group's copy back."""
        wait_here(group.arrived)

    def forget(self, group: TravellingGroup) -> None:
        """Nothing of the group can be asked for any more; its copy out may still be under way."""
        self._in.forget(group.arrived)
        if not group.held.leaving_bytes:  # else `let_go` is still to ask for its event
            self._out.forget(group.left)
            group.left = None
        group.arrived = None

    def outlive(self, group: TravellingGroup) -> None:
        """The group's copy back may still be under way when its buffers are freed."""
        self._in.outlive(list(group.incoming.values()))

    def join(self) -> None:
        """The compute stream goes on behind all copies."""
        self._out.join()
        self._in.join()
