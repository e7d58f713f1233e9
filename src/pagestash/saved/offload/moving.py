"""`Offload`: the home that moves saved tensors to host memory during forward, and back before backward asks.

`window` decides by a plan, `transfers` copies; this gives an entry its host memory and its pages, and takes them
back.

The plan of the first step is that all groups leave at once, and that each return is waited for. That step takes
ordinary host memory, and asks the device how many rows are valid (`measured.py`). The plan of the others is made
from it.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from pagestash.kernels.backend import choose
from pagestash.kernels.pages.tail import zero_tail
from pagestash.pages.host import MakeSlab, host_slab
from pagestash.pages.slabs import HostExtent, HostSlabs, ordinary_extent, places
from pagestash.policy import HomeName, Policy, Rule
from pagestash.saved.home import Home, Keep, Tally
from pagestash.saved.offload.headroom import HeadroomMeter, Reading
from pagestash.saved.offload.measured import FirstStep, Outlook
from pagestash.saved.offload.plan import Event, GroupBytes, Key, OffloadPlan, StepOrder, make_plan
from pagestash.saved.offload.split import EntryShape, RowSplit, rows_behind
from pagestash.saved.offload.transfers import Member, Transfers, TravellingGroup
from pagestash.saved.offload.window import Decision, Window, WindowGroup
from pagestash.saved.stash import Stash
from pagestash.saved.storage import Entry
from pagestash.saved.streams import capturing
from pagestash.sizes import format_bytes

log = logging.getLogger("pagestash")


@dataclass(slots=True, eq=False)
class OffloadedGroup(TravellingGroup):
    """The place of each entry of a group, whatever became of it."""

    owner: "Offload | None" = field(default=None, repr=False)
    """None once all entries are dropped: the owner knows its groups, and a circle would keep pinned memory."""
    extent: HostExtent | None = None
    """Its host memory, if anything of it has left."""
    alive: int = 0
    """Entries that were not dropped yet."""
    refused: int = 0
    """Bytes for which there was no host memory."""
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


class Offload(Home):
    """Moves groups by a plan that was made from an earlier step.

    A step is `start`, puts and gets, `settle`, `commit`. When the measured step is over, `outlook` tells how many
    pages its plan needs; `begin` makes it the plan of the steps to come, as soon as there is a pool of so many.
    """

    name: HomeName = "offload"

    def __init__(
        self,
        policy: Policy,
        keep: Keep,
        stash: Stash,
        read_memory: Callable[[], Reading | None],
        backend: str = "auto",
        make_slab: MakeSlab = host_slab,
    ) -> None:
        super().__init__()
        self.order = StepOrder()
        """What the step has put and asked for so far."""
        self._policy = policy
        self._keep = keep
        self._stash = stash
        self._read_memory = read_memory
        self._backend = backend
        self._make_slab = make_slab
        self.refused = Tally()
        """Bytes that should have left, but found no room on the host, and stayed."""
        self.window = Window(OffloadPlan({}))
        self._groups: dict[WindowGroup, OffloadedGroup] = {}
        self._dead: deque[tuple[OffloadedGroup, Entry]] = deque()
        self._asked: OffloadedGroup | None = None
        """The group that was asked for last. None once another was put, or all of one dropped: until then, whoever
        asks for more of it finds everything decided."""
        self.measure()

    def measure(self) -> None:
        """The next step is measured, as the first one is."""
        self.tally.reset_peak()
        self.moved_rules: set[str] = set()
        """Patterns of the rules of what has left by the plan."""
        self.measured: FirstStep | None = FirstStep(self.order, HeadroomMeter(self._read_memory))
        """Until there is a plan."""
        self.window.plan = OffloadPlan({})
        self._split = RowSplit({})
        self._tells_measured = True
        """Whether the tally has peaks of the measured step."""
        self._at: torch.device | None = None

    def _work_on(self, device: torch.device) -> None:
        """Make what copies need, with the first group."""
        if self._at is None:
            self._at = device
            self.slabs = HostSlabs(device, self._policy.offload_bytes, self._make_slab)
            self.transfers = Transfers(device)
            self._tail_backend = choose(device, self._backend)

    @property
    def live(self) -> bool:
        """Whether a backward is still to come."""
        self.sweep()
        return bool(self._groups)

    # --- a step ---

    def start(self) -> None:
        if self.measured is not None:
            self.measured.start(self._waiting())
            return
        self.order.start()
        self._split.start()
        self.refused.reset_peak()
        if self._tells_measured:
            self._tells_measured = False
            self.tally.reset_peak()

    def settle(self) -> None:
        """The current stream has waited for both side streams, and the host knows what is free."""
        self._asked = None
        self.sweep()
        if self._at is not None:
            self._carry_out(self.window.let_all_go())
            self.transfers.join()

    def give_up(self) -> None:
        if capturing():  # what it reserved never happened on the device
            self.settle()

    def commit(self) -> None:
        """Plan anew if the step went another way, and make the host memory that was missing."""
        order = self.order
        if self.measured is not None:
            self.measured.commit(self._waiting())
            return
        if not order.groups:
            return  # nothing was saved: an evaluation
        if not self.window.plan.agrees_with(order):
            self.window.plan = make_plan(order.events, order.groups, order.immediate_backwards)
        slabs = self.slabs
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

    # --- the plan ---

    @property
    def plan(self) -> OffloadPlan | None:
        """What moves; None before the measured step is over."""
        return None if self.measured is not None else self.window.plan

    @property
    def undecided(self) -> bool:
        """Whether the measured step is not over: a backward is still to come."""
        return self.measured is not None and self.measured.undecided(self._waiting())

    def _waiting(self) -> set[Key]:
        """Groups of this step that somebody may still ask for."""
        self.sweep()
        return self.order.groups.keys() & self.window.groups.keys()

    def outlook(self) -> Outlook | None:
        """What the measured step says about those to come; None if it moved nothing, is not over, or was used."""
        found = self.measured
        return None if found is None else found.outlook(self._waiting(), self._policy.pool.page_bytes)

    def begin(self, outlook: Outlook, device: torch.device) -> None:
        """From here on move by a plan."""
        self._work_on(device)
        self.slabs.fit(outlook.host_bytes)
        self.window.plan = outlook.plan
        self._split = outlook.split
        self.measured = None

    def expect(self, events: Sequence[Event], groups: dict[Key, GroupBytes]) -> None:
        """Before a step: what it will put and get, in order. Nothing happens while there is no plan at all yet."""
        if self.measured is None and not capturing():
            plan = self.window.plan = make_plan(events, groups, self.order.immediate_backwards)
            wanted = plan.host_peak_bytes(events)
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
        rule, region = entries[0].rule, entries[0].region
        assert rule is not None
        if self.measured is not None and capturing():
            # Seen by a capture first. To measure it would be to wait for the device, which a capture cannot.
            for entry in entries:
                entry.place = self._keep.stay(entry)
            return
        assert entries[0].origin is not None
        self._work_on(entries[0].origin.device)
        self._asked = None
        self.sweep()
        key = self.order.key(region)
        if self.measured is not None:
            shares = self.measured.valid_bytes(key, rule, entries)
        else:
            self._split.go_on_with(self.order.microbatch)
            shares = [self._split.share(rule, EntryShape.of(entry)) for entry in entries]
        starts, host_bytes = places(shares)
        device_bytes = sum([entry.last - entry.first for entry, share in zip(entries, shares) if share])
        self.order.put(key, GroupBytes(host_bytes, device_bytes, rule.prefetch_bytes))
        # (All of them count from the start: the collector may drop the first before the second has its place.)
        group = OffloadedGroup(WindowGroup(key, device_bytes), owner=self, alive=len(entries))
        if host_bytes and not self.window.stays(key):
            self._take_host_memory(group, region, host_bytes)
        self._groups[group.held] = group
        for entry, share, at in zip(entries, shares, starts):
            self._admit(group, entry, rule, 0 if group.extent is None else share, at)
        leaving = [entry for entry, member in group.members.items() if member.share]
        moved = [entry for entry, member in group.members.items() if member.stays is None]
        if leaving:
            self.transfers.move_out(group, leaving)
        self.window.put(group.held)
        for entry in moved:
            entry.origin = None
        if moved and self.measured is None:
            self.moved_rules.add(rule.match)
        self._see_what_has_left()
        self._carry_out(self.window.after_put(group.held))
        if self.measured is not None:
            self.measured.meter.note(("put", key))

    def _take_host_memory(self, group: OffloadedGroup, region: str, size: int) -> None:
        if self.measured is not None:
            group.extent = ordinary_extent(size)
            return
        group.slabs = self.slabs
        group.extent = group.slabs.take(size)
        if group.extent is None:
            group.refused = size
            self.refused.count(region, size)

    def _admit(self, group: OffloadedGroup, entry: Entry, rule: Rule, share: int, at: int) -> None:
        """Settle what becomes of an entry's bytes, and put away those that do not leave."""
        member = group.members[entry] = Member(share)
        entry.place = group  # from here on its end gives back what it was given, also if something fails
        held = group.held
        if not share and (entry.rows is None or self._split.mostly_valid(rule, EntryShape.of(entry))):
            held.kept_bytes += entry.length
            member.stays = self._keep.stay(entry)
            return
        if share:
            assert group.extent is not None
            form = entry.form if share == entry.last - entry.first else None
            made = None if form is None else group.extent.in_form(at, form)
            member.whole = made is not None
            member.host = group.extent.memory[at : at + share] if made is None else made
            self.tally.count(entry.region, share)
            held.travelling_bytes += share
            held.away_bytes += entry.last - entry.first
        if entry.rows is not None:
            # Its buffer has room for the worst case: rows that do not leave are better off in pages.
            member.rows = entry.rows.detach().clone()
            if share < entry.length and self.measured is None:
                member.rest = rows_behind(entry, share)
                member.rest_place = self._stash.take(member.rest)

    # --- in: backward asks for an entry ---

    def get(self, group: OffloadedGroup, entry: Entry) -> torch.Tensor:
        self.sweep()
        stays = group.members[entry].stays
        if self._asked is not group or (stays is None and entry not in group.restored):
            self._see_what_has_left()
            key = group.held.key
            self.order.get(key)
            if self.measured is not None and key in self.order.groups:
                self.measured.meter.note(("get", key))
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
                lead = rows.shape[0] if member.rest is None else member.share // rows.shape[1]
                zero_tail(rows[:lead], member.rows, self._tail_backend)
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
                self.tally.count(entry.region, -member.share)
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
            self.order.drop(group.held.key)
        self.window.drop(group.held)
        self.transfers.forget(group)
        if group.slabs is not None and group.refused:
            group.slabs.forget(group.refused)
            self.refused.count(region, -group.refused)
        elif group.slabs is not None and group.extent is not None:
            group.slabs.give(group.extent)
        group.extent = None


def _drop_rest(member: Member) -> None:
    """Give back the pages of rows that did not leave, once: the last drop and `sweep` may be in two threads."""
    if member.rest is not None:
        rest, member.rest = member.rest, None
        if rest is not None and rest.place is not None:
            rest.place.drop(rest)
