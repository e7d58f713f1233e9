"""Steps of the `offload` home that go by a plan: groups leave when forward ends them, and return ahead of backward.

`window` decides, `transfers` copies; this gives an entry its host memory and its pages, and takes them back.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from pagestash.kernels.backend import choose
from pagestash.kernels.pages.tail import zero_tail
from pagestash.pages.slabs import HostSlabs, places
from pagestash.policy import Rule
from pagestash.saved.homes import Keep, Tally
from pagestash.saved.offload.plan import Event, GroupBytes, Key, OffloadPlan, StepOrder, make_plan
from pagestash.saved.offload.split import EntryShape, RowSplit
from pagestash.saved.offload.transfers import Member, OffloadedGroup, Transfers
from pagestash.saved.offload.window import Decision, Window, WindowGroup
from pagestash.saved.stash import Stash
from pagestash.saved.storage import Entry
from pagestash.saved.streams import capturing
from pagestash.sizes import format_bytes

log = logging.getLogger("pagestash")


class Moving:
    """Moves groups by a plan that was made from an earlier step."""

    def __init__(
        self,
        device: torch.device,
        slabs: HostSlabs,
        plan: OffloadPlan,
        split: RowSplit,
        keep: Keep,
        stash: Stash,
        order: StepOrder,
        tally: Tally,
        backend: str = "auto",
    ) -> None:
        self.slabs = slabs
        self.window = Window(plan)
        self.transfers = Transfers(device)
        self.refused = Tally()
        """Bytes that should have left, but found no room on the host, and stayed."""
        self.moved_rules: set[str] = set()
        """Patterns of the rules of what has left."""
        self._tally = tally
        self._started = False
        self._backend = choose(device, backend)
        self._split = split
        self._keep = keep
        self._stash = stash
        self._order = order
        self._groups: dict[WindowGroup, OffloadedGroup] = {}
        self._dead: deque[tuple[OffloadedGroup, Entry]] = deque()
        self._asked: OffloadedGroup | None = None
        """The group that was asked for last. None once another was put, or all of one dropped: until then, whoever
        asks for more of it finds everything decided."""

    @property
    def plan(self) -> OffloadPlan:
        return self.window.plan

    @property
    def live(self) -> bool:
        """Whether a backward is still to come."""
        self.sweep()
        return bool(self._groups)

    # --- a step ---

    def start(self) -> None:
        """A new step begins."""
        self._order.start()
        self._split.start()
        self.refused.reset_peak()
        if not self._started:  # until now the tally told what was measured
            self._started = True
            self._tally.reset_peak()

    def settle(self) -> None:
        """End of a step: the current stream has waited for both side streams, and the host knows what is free."""
        self._asked = None
        self.sweep()
        self._carry_out(self.window.let_all_go())
        self.transfers.join()

    def learn(self) -> None:
        """Between steps: plan anew if the step went another way, and make the room that was missing."""
        order, slabs = self._order, self.slabs
        if not order.groups:
            return  # nothing was saved: an evaluation
        if not self.plan.agrees_with(order):
            self.window.plan = make_plan(order.events, order.groups, order.immediate_backwards)
        if slabs.wanted > slabs.size:
            self.slabs.fit(slabs.wanted)
        elif self.refused.peak:  # there was room enough, in pieces that were too small
            self.slabs.fit(slabs.size + self.refused.peak)
        if self.refused.peak and slabs.wanted > slabs.size:
            log.warning(
                "offload: %s stayed on the device, since host memory is limited to %s; raise [pool] host",
                format_bytes(self.refused.peak),
                format_bytes(slabs.limit),
            )

    def expect(self, events: Sequence[Event], groups: dict[Key, GroupBytes]) -> None:
        """Before a step: this is what it will do, and not what the one before did."""
        self.window.plan = make_plan(events, groups, self._order.immediate_backwards)
        wanted = self.plan.host_peak_bytes(events)
        if wanted > self.slabs.size:
            self.slabs.fit(wanted)

    def _carry_out(self, decisions: Iterator[Decision], asked: Entry | None = None) -> None:
        for what, held in decisions:
            if what == "let go":
                self.transfers.let_go()
            elif what == "fetch":
                self._fetch(self._groups[held], asked)
            elif asked is not None:
                self._use(self._groups[held], asked)

    def _see_what_has_left(self) -> None:
        while self.transfers.oldest_has_left():
            self.transfers.let_go(over=True)
            self.window.gone()

    # --- out: forward saves a group ---

    def put(self, entries: Sequence[Entry]) -> None:
        self._asked = None
        self.sweep()
        rule, region = entries[0].rule, entries[0].region
        assert rule is not None
        key = self._order.key(region)
        self._split.go_on_with(self._order.microbatch)
        shares = [self._split.share(rule, EntryShape.of(entry)) for entry in entries]
        starts, host_bytes = places(shares)
        device_bytes = sum([entry.last - entry.first for entry, share in zip(entries, shares) if share])
        self._order.put(key, GroupBytes(host_bytes, device_bytes, rule.prefetch_bytes))
        # (All of them count from the start: the collector may drop the first before the second has its place.)
        group = OffloadedGroup(self, WindowGroup(key, device_bytes), len(entries))
        self._groups[group.held] = group
        if host_bytes and not self.window.stays(key):
            group.extent = self.slabs.take(host_bytes)
            if group.extent is None:
                group.refused = host_bytes
                self.refused.count(region, host_bytes)
        for entry, share, at in zip(entries, shares, starts):
            self._admit(group, entry, rule, 0 if group.extent is None else share, at)
        leaving = [entry for entry, member in group.members.items() if member.share]
        moved = [entry for entry, member in group.members.items() if member.stays is None]
        if leaving:
            self.slabs.fixed = self.slabs.fixed or capturing()
            self.transfers.move_out(group, leaving)
        self.window.put(group.held)
        for entry in moved:
            entry.origin = None
        if moved:
            self.moved_rules.add(rule.match)
        self._see_what_has_left()
        self._carry_out(self.window.after_put(group.held))

    def _admit(self, group: OffloadedGroup, entry: Entry, rule: Rule, share: int, at: int) -> None:
        """Settle what becomes of an entry's bytes, and put away those that do not leave."""
        member = group.members[entry] = Member(share, at)
        entry.place = group  # from here on its end gives back what it was given, also if something fails
        held = group.held
        if not share and (entry.rows is None or self._split.mostly_valid(rule, EntryShape.of(entry))):
            held.kept_bytes += entry.length
            member.stays = self._keep.stay(entry)
            return
        if share:
            self._tally.count(entry.region, share)
            held.travelling_bytes += share
            held.away_bytes += entry.last - entry.first
        if entry.rows is not None:
            # Its buffer has room for the worst case: rows that do not leave are better off in pages.
            member.rows = entry.rows.detach().clone()
            if share < entry.length:
                member.rest = _rows_behind(entry, share)
                member.rest_place = self._stash.take(member.rest)

    # --- in: backward asks for an entry ---

    def get(self, group: OffloadedGroup, entry: Entry) -> torch.Tensor:
        self.sweep()
        stays = group.members[entry].stays
        if self._asked is not group or (stays is None and entry not in group.restored):
            self._see_what_has_left()
            self._order.get(group.held.key)
            self._carry_out(self.window.get(group.held, kept=stays is not None), entry)
            self._asked = group
        if stays is not None:
            return stays.get(entry)
        flat = group.restored[entry]
        if not entry.waiting:
            # All who saved it have it now; whoever asks again (retain_graph, split backward) fetches again.
            del group.restored[entry]
        return flat

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
        self.transfers.fetch(group, entries)

    def _use(self, group: OffloadedGroup, asked: Entry) -> None:
        """The compute stream is about to read an entry."""
        if asked in group.restored:
            return
        if asked not in group.incoming:  # it came back before, and was asked for by all who had saved it
            self._fetch(group, asked)
            self.window.fetched(group.held)
        self._take_in(group)

    def _take_in(self, group: OffloadedGroup) -> None:
        """From here on the compute stream may read what came back; rows that did not leave come from pages."""
        self.transfers.wait_for(group)
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

    # --- over: nothing can ask any more ---

    def drop(self, group: OffloadedGroup, entry: Entry) -> None:
        member = group.members[entry]
        if member.stays is not None:
            member.stays.drop(entry)
        group.restored.pop(entry, None)
        # This may run in any thread, on any stream, also while another entry of the group is taken in: its host
        # memory and its pages are given back in the order of compute.
        self._dead.append((group, entry))

    def ended(self, group: OffloadedGroup) -> None:
        """All entries of a group are dropped, in any thread. If the home ends, too, nobody will sweep."""
        for member in list(group.members.values()):
            _drop_rest(member)
        if group.incoming:  # which nobody asked for
            self.transfers.outlive(group)

    def sweep(self) -> None:
        """Give back what dropped entries had, and the host memory of groups that are dropped as a whole."""
        while self._dead:
            group, entry = self._dead.popleft()
            member = group.members.pop(entry)
            if member.share:
                self.window.shrink(group.held, away=entry.last - entry.first, travelling=member.share)
                self._tally.count(entry.region, -member.share)
            elif member.stays is not None:
                self.window.shrink(group.held, kept=entry.length)
            if entry in group.incoming:
                # Nobody asked for it, and its copy back may still be under way: the memory of its buffer and on
                # the host is used again only behind it.
                self.transfers.wait_for(group)
                del group.incoming[entry]
            _drop_rest(member)
            if not group.members and self._groups.pop(group.held, None) is not None:
                self._end(group, entry.region)

    def _end(self, group: OffloadedGroup, region: str) -> None:
        self._asked = None
        if self.window.groups.get(group.held.key) is group.held:
            self._order.drop(group.held.key)
        self.window.drop(group.held)
        self.transfers.forget(group)
        if group.refused:
            self.slabs.forget(group.refused)
            self.refused.count(region, -group.refused)
        if group.extent is not None:
            self.slabs.give(group.extent)
            group.extent = None


def _drop_rest(member: Member) -> None:
    """Give back the pages of rows that did not leave, once: the last drop and `sweep` may be in two threads."""
    if member.rest is not None:
        rest, member.rest = member.rest, None
        if rest is not None and rest.place is not None:
            rest.place.drop(rest)


def _rows_behind(entry: Entry, share: int) -> Entry:
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
