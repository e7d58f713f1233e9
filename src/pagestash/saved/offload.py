"""The `offload` home: saved tensors wait in pinned host memory, moved by the copy engine beside compute.

Two streams of their own: out during forward, in during backward. The hand-overs, and why each is safe:

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

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagestash.kernels.backend import choose
from pagestash.kernels.pages.tail import zero_tail
from pagestash.pages.slabs import HostBlock, HostSlabs, aligned
from pagestash.policy import HomeName, Rule, format_bytes
from pagestash.saved.homes import Held, Home, Keep, Tally
from pagestash.saved.order import Event, Group, Key, Plan, Recorder, make_plan
from pagestash.saved.split import Shape, Split
from pagestash.saved.stash import Stash, StashPlace
from pagestash.saved.storage import Entry
from pagestash.saved.streams import SideStream, capturing, is_done, wait_here

log = logging.getLogger("pagestash")


@dataclass(slots=True, eq=False)
class Member:
    """One entry of a group: its leading bytes in host memory, and the rows behind them in pages."""

    share: int = 0
    here: int = 0
    """Its bytes on the device, or on their way out or back."""
    block: HostBlock | None = None
    refused: int = 0
    rest: Entry | None = None
    rest_place: StashPlace | None = None
    stays: Held | None = None
    rows: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class OffloadedGroup:
    """The entries of one region in one microbatch, on their way out, on the host, and on their way back."""

    home: "Offload"
    key: Key
    members: dict[Entry, Member] = field(default_factory=dict)
    sources: list[tuple[Entry, torch.Tensor]] = field(default_factory=list)
    """What of it is leaving: the memory that the copies read."""
    left: torch.cuda.Event | None = None
    incoming: dict[Entry, torch.Tensor] = field(default_factory=dict)
    arrived: torch.cuda.Event | None = None
    restored: dict[Entry, torch.Tensor] = field(default_factory=dict)

    def get(self, entry: Entry) -> torch.Tensor:
        return self.home.get(self, entry)

    def drop(self, entry: Entry) -> None:
        self.home.drop(self, entry)


class Offload(Home):
    """Moves groups out as forward ends them and back ahead of backward, by a plan made from an earlier step."""

    name: HomeName = "offload"

    def __init__(
        self,
        device: torch.device,
        slabs: HostSlabs,
        plan: Plan,
        split: Split,
        keep: Keep,
        stash: Stash,
        recorder: Recorder,
        *,
        tally: Tally | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.slabs = slabs
        self.plan = plan
        self.tally = tally or Tally()  # until the next step, what was measured
        self._started = False
        self.refused = Tally()
        """Bytes that should have left, but found no room on the host, and stayed."""
        self.moved: set[str] = set()
        """Regions of which anything has left."""
        self._device = device
        self._backend = choose(device, backend)
        self._split = split
        self._keep = keep
        self._stash = stash
        self._recorder = recorder
        self._out = SideStream(device)
        self._in = SideStream(device)
        self._live: dict[Key, OffloadedGroup] = {}
        self._on_device: dict[Key, int] = {}
        self._here = 0  # bytes on the device: kept, leaving, coming back and in use
        self._leaving: deque[OffloadedGroup] = deque()
        self._dead: deque[tuple[OffloadedGroup, Entry]] = deque()

    @property
    def live(self) -> bool:
        """Whether a backward is still to come."""
        self._sweep()
        return bool(self._live)

    # --- a step ---

    def start(self) -> None:
        """A new step begins."""
        self._recorder.start()
        self._split.start()
        self.refused.reset_peak()
        if not self._started:
            self._started = True
            self.tally.reset_peak()

    def settle(self) -> None:
        """End of a step: the current stream has waited for both side streams, and the host knows what is free."""
        self._sweep()
        self._let_go(0)
        self._out.join()
        self._in.join()

    def give_up(self) -> None:
        if capturing():  # what it reserved never happened on the device
            self.settle()

    def commit(self) -> None:
        """Plan anew if the step went another way, and make the room that was missing."""
        recorder, slabs = self._recorder, self.slabs
        if not recorder.groups:
            return  # nothing was saved: an evaluation
        if not self.plan.agrees_with(recorder):
            self.plan = make_plan(recorder.events, recorder.groups, recorder.turns)
        if slabs.wanted > slabs.size:
            slabs.fit(slabs.wanted)
        elif self.refused.peak:  # there was room enough, in pieces that were too small
            slabs.fit(slabs.size + self.refused.peak)
        if self.refused.peak and slabs.wanted > slabs.size:
            log.warning(
                "offload: %s stayed on the device, since host memory is limited to %s; raise [pool] host",
                format_bytes(self.refused.peak),
                format_bytes(slabs.limit),
            )

    def expect(self, events: Sequence[Event], groups: dict[Key, Group]) -> None:
        """Before a step: this is what it will do, and not what the one before did."""
        self.plan = make_plan(events, groups, self._recorder.turns)
        wanted = self.plan.peak_bytes(events)
        if wanted > self.slabs.size:
            self.slabs.fit(wanted)

    # --- out: forward saves a group ---

    def put(self, group: Sequence[Entry]) -> None:
        self._sweep()
        rule = group[0].rule
        assert rule is not None
        key = self._recorder.key(group[0].region)
        shares = {entry: self._split.share(rule, Shape.of(entry)) for entry in group}
        size = sum(map(aligned, shares.values()))
        room = sum(entry.length for entry, share in shares.items() if share)
        self._recorder.put(key, Group(size, room, rule.prefetch_bytes))
        stays = key in self.plan.stays
        offloaded = OffloadedGroup(self, key)
        for entry, share in shares.items():
            self._admit(offloaded, entry, rule, 0 if stays else share)
        self._live[key] = offloaded
        moved = [entry for entry, member in offloaded.members.items() if member.block is not None]
        if moved:
            self.slabs.fixed |= capturing()
            self._move_out(offloaded, moved)
        elif stays and room:  # and not for want of host memory, or because the rule's fraction leaves it here
            self._on_device[key] = room
        for entry, member in offloaded.members.items():
            if member.stays is None:
                entry.origin = None
                self.moved.add(entry.region)
        self._prefetch(("put", key))
        self._let_go(self._may_be_leaving(key))

    def _admit(self, group: OffloadedGroup, entry: Entry, rule: Rule, share: int) -> None:
        """Decide what becomes of an entry's bytes, and put away those that do not leave."""
        member = group.members[entry] = Member()
        entry.place = group  # from here on its end gives back what it was given, also if something fails
        if share:
            member.block = self.slabs.take(share)
            if member.block is None:
                member.refused = share
                self.refused.count(entry.region, share)
                share = 0
        member.share = share
        if not share and (entry.rows is None or self._split.mostly_valid(rule, Shape.of(entry))):
            self._count(member, entry.length)
            member.stays = self._keep.stay(entry)
            return
        self.tally.count(entry.region, share)
        self._count(member, share)
        if entry.rows is not None:
            # Its buffer has room for the worst case: rows that do not leave are better off in pages.
            member.rows = entry.rows.detach().clone()
            if share < entry.length:
                member.rest = _rest(entry, share)
                member.rest_place = self._stash.take(member.rest)

    def _move_out(self, group: OffloadedGroup, moved: list[Entry]) -> None:
        with self._out.after():
            for entry in moved:
                source, start = entry.source().view(-1), 0
                for piece in _pieces(group.members[entry]):
                    part = source[start : min(start + piece.numel(), group.members[entry].share)]
                    piece[: part.numel()].copy_(part, non_blocking=True)
                    start += part.numel()
        group.left = self._out.mark()
        group.sources = [(entry, entry.origin) for entry in moved if entry.origin is not None]
        self._leaving.append(group)

    def _may_be_leaving(self, key: Key) -> int:
        """Bytes that may still be on their way out now that `key` was put.

        A part of the window; or more, where memory is known to be further from its peak than that.
        """
        near = self.plan.leaving_limit(key, sum(self._on_device.values()))
        slack = self.plan.slack.get(("put", key), 0)
        if slack <= near:
            return near
        leaving = sum(
            group.members[entry].here
            for group in self._leaving
            for entry, _ in group.sources
            if entry in group.members
        )
        return max(near, slack - (self._here - leaving))

    def _let_go(self, limit: int, asked: OffloadedGroup | None = None) -> None:
        """Let go of sources whose copy is done, and of the oldest until no more than `limit` bytes are leaving.

        The allocator gives freed memory to the next operation of the compute stream, which is therefore told
        to wait for the copy unless that is known to be over. Those of `asked` are let go in any case, with all
        before them: it must be known whether they were changed.
        """
        leaving = sum(_bytes_of(group.sources) for group in self._leaving)
        while self._leaving:
            group = self._leaving[0]
            if not is_done(group.left):
                if leaving <= limit and (asked is None or not asked.sources):
                    return
                wait_here(group.left)
            leaving -= _bytes_of(group.sources)
            for entry, origin in group.sources:
                # Written over while the copy may have been reading it.
                entry.spoiled |= origin._version != entry.version
                if entry in group.members:  # or it was dropped meanwhile
                    self._count(group.members[entry], 0)
            group.sources = []
            self._leaving.popleft()

    def _count(self, member: Member, here: int) -> None:
        """So many of its bytes are on the device now."""
        self._here += here - member.here
        member.here = here

    # --- in: backward asks for an entry ---

    def get(self, group: OffloadedGroup, entry: Entry) -> torch.Tensor:
        self._sweep()
        stays = group.members[entry].stays
        # What still leaves is memory that backward can use, but for what is left of the window.
        there = sum(self._on_device.values())
        if group.key not in self._on_device:
            there += _room_of(group)
        self._let_go(max(0, self.plan.ahead(group.key) - there), group)
        if stays is not None:
            self._asked(group)
            return stays.get(entry)
        if entry not in group.restored:
            if entry not in group.incoming:
                self._fetch(group, entry)
            self._take_in(group)
        self._asked(group)
        flat = group.restored[entry]
        if not entry.waiting:
            # All who saved it have it now; whoever asks again (retain_graph, split backward) fetches again.
            del group.restored[entry]
        return flat

    def _asked(self, group: OffloadedGroup) -> None:
        self._recorder.get(group.key)
        self._prefetch(("get", group.key))

    def _fetch(self, group: OffloadedGroup, asked: Entry | None = None) -> None:
        """Start to bring back what of the group will be asked for."""
        entries = [
            entry
            for entry, member in group.members.items()
            if member.stays is None
            and entry not in group.restored
            and entry not in group.incoming
            and (entry is asked or entry.waiting)
        ]
        buffers = {
            entry: torch.empty(entry.length, dtype=torch.uint8, device=self._device) for entry in entries
        }
        for entry in entries:
            self._count(group.members[entry], group.members[entry].share)
        with self._in.after(group.left):
            for entry, buffer in buffers.items():
                member, start = group.members[entry], 0
                for piece in _pieces(member):
                    part = buffer[start : min(start + piece.numel(), member.share)]
                    part.copy_(piece[: part.numel()], non_blocking=True)
                    start += part.numel()
        group.arrived = self._in.mark()
        group.incoming |= buffers
        self._on_device[group.key] = _room_of(group)

    def _take_in(self, group: OffloadedGroup) -> None:
        """From here on the compute stream may read what came back; the rest of it comes from pages."""
        wait_here(group.arrived)
        for entry, buffer in group.incoming.items():
            member = group.members[entry]
            if member.rows is not None:
                rows = buffer.view(entry.capacity, -1)
                lead = member.share // rows.shape[1]
                zero_tail(rows[:lead], member.rows, self._backend)
                if member.rest is not None and member.rest_place is not None:
                    member.rest_place.restore_into(member.rest, rows[lead:])
                    entry.spoiled |= member.rest.spoiled
        group.restored |= group.incoming
        group.incoming = {}

    def _prefetch(self, event: Event) -> None:
        """Fetch what backward asks for next, as long as all that is on the device then fits in its window.

        Groups that stay, and groups still to be put, take their part of it. So while the last groups of a
        forward are there nothing is fetched, and as backward uses them up others take their place.
        """
        there = sum(self._on_device.values())
        seen: set[Key] = set()
        for kind, key in self.plan.after(event):
            if key in seen or key in self._on_device:
                continue
            seen.add(key)
            group = self._live.get(key)
            if group is not None and not _room_of(group):
                continue  # nothing of it has left
            there += self.plan.groups[key].room
            if kind == "put" or key in self.plan.stays:
                if there > self.plan.window:
                    return
            elif there > self.plan.fetch_limit(key):
                return
            elif group is not None:  # or the step has left the plan
                # First the room: what leaves gives way to what is asked for soon.
                self._let_go(max(0, self.plan.window - there), group)
                self._fetch(group)

    # --- over: nothing can ask any more ---

    def drop(self, group: OffloadedGroup, entry: Entry) -> None:
        stays = group.members[entry].stays
        if stays is not None:
            stays.drop(entry)
        group.restored.pop(entry, None)
        # This may run in any thread, on any stream: the rest is done in the order of compute.
        self._dead.append((group, entry))

    def _sweep(self) -> None:
        """Give back the host memory and pages of dropped entries."""
        while self._dead:
            group, entry = self._dead.popleft()
            member = group.members.pop(entry)
            self._count(member, 0)
            if entry in group.incoming:
                # Nobody asked for it, and its copy back may still be under way: the buffer's memory and the
                # block's are used again only behind it.
                wait_here(group.arrived)
                del group.incoming[entry]
            if member.rest is not None and member.rest.place is not None:
                member.rest.place.drop(member.rest)
            if member.refused:
                self.slabs.forget(member.refused)
                self.refused.count(entry.region, -member.refused)
            if member.block is not None:
                self.slabs.give(member.block)
                self.tally.count(entry.region, -member.share)
            if not group.members and self._live.get(group.key) is group:
                self._recorder.drop(group.key)
                self._on_device.pop(group.key, None)
                del self._live[group.key]


def _room_of(group: OffloadedGroup) -> int:
    """Bytes that it takes on the device when what has left is back."""
    return sum(entry.length for entry, member in group.members.items() if member.share)


def _bytes_of(sources: list[tuple[Entry, torch.Tensor]]) -> int:
    return sum(origin.untyped_storage().nbytes() for _, origin in sources)


def _pieces(member: Member) -> tuple[torch.Tensor, ...]:
    return () if member.block is None else member.block.pieces


def _rest(entry: Entry, share: int) -> Entry:
    """The rows of a valid-row entry behind its first `share` bytes, as an entry of its own."""
    assert entry.rows is not None
    lead = share // (entry.length // entry.capacity)
    rows = (entry.rows.detach() - lead).clamp_(min=0)
    return Entry(
        storage=entry.storage,
        version=entry.version,
        first=entry.first + share,
        last=entry.last,
        origin=entry.origin,
        rows=rows,
        rows_version=rows._version,
        capacity=entry.capacity - lead,
        region=entry.region,
        rule=entry.rule,
    )
