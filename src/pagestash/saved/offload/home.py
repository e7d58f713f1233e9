"""`Offload`: the home that moves saved tensors to host memory during forward and back before backward asks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pagestash.pages.host import MakeSlab, host_slab
from pagestash.pages.slabs import HostSlabs
from pagestash.policy import HomeName, Policy
from pagestash.saved.homes import Home, Keep, Tally
from pagestash.saved.offload.headroom import HeadroomMeter, Reading
from pagestash.saved.offload.measuring import Measuring, Outlook
from pagestash.saved.offload.moving import Moving
from pagestash.saved.offload.plan import Event, GroupBytes, Key, OffloadPlan, StepOrder
from pagestash.saved.stash import Stash
from pagestash.saved.storage import Entry
from pagestash.saved.streams import capturing


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Pinned memory of the `offload` home, and the bytes that found no room in it and stayed on the device."""

    host_bytes: int
    limit: int
    refused: int
    refused_peak: int


class Offload(Home):
    """Measures its first step, and moves by a plan from then on.

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
        self.measure()

    def measure(self) -> None:
        """The next step is measured, as the first one is."""
        self.tally = Tally()
        self.measuring = Measuring(self.order, HeadroomMeter(self._read_memory), self.tally)
        self.moving: Moving | None = None
        """Once there is a plan."""

    @property
    def _phase(self) -> Measuring | Moving:
        return self.measuring if self.moving is None else self.moving

    @property
    def live(self) -> bool:
        return self._phase.live

    # --- a step ---

    def start(self) -> None:
        self._phase.start()

    def put(self, entries: Sequence[Entry]) -> None:
        if self.moving is None and capturing():
            # Seen by a capture first. To measure it would be to wait for the device, which a capture cannot.
            for entry in entries:
                entry.place = self._keep.stay(entry)
            return
        self._phase.put(entries)

    def settle(self) -> None:
        if self.moving is not None:
            self.moving.settle()

    def give_up(self) -> None:
        if capturing():  # what it reserved never happened on the device
            self.settle()

    def commit(self) -> None:
        """Plan anew if the step went another way, and make host memory that was missing."""
        if self.moving is None:
            self.measuring.commit()
        else:
            self.moving.learn()

    # --- the plan ---

    @property
    def plan(self) -> OffloadPlan | None:
        """What moves; None before the measured step is over."""
        return None if self.moving is None else self.moving.plan

    @property
    def undecided(self) -> bool:
        """Whether the measured step is not over: a backward is still to come."""
        return self.moving is None and self.measuring.undecided

    def outlook(self) -> Outlook | None:
        """What the measured step says about those to come; None if it moved nothing, is not over, or was used."""
        return self.measuring.outlook(self._policy.pool.page_bytes) if self.moving is None else None

    def begin(self, outlook: Outlook, device: torch.device) -> None:
        """From here on move by a plan."""
        slabs = HostSlabs(device, self._policy.offload_bytes, self._make_slab)
        slabs.fit(outlook.host_bytes)
        self.moving = Moving(
            device,
            slabs,
            outlook.plan,
            outlook.split,
            self._keep,
            self._stash,
            self.order,
            self.tally,
            self._backend,
        )

    def expect(self, events: Sequence[Event], groups: dict[Key, GroupBytes]) -> None:
        """Before a step: what it will put and get, in order. Nothing happens while there is no plan at all yet."""
        if self.moving is not None and not capturing():
            self.moving.expect(events, groups)

    def expected(self) -> dict[Key, GroupBytes]:
        """The groups of the step that is planned; empty before there is a plan."""
        return {} if self.moving is None else self.moving.plan.groups

    # --- counts ---

    def sweep(self) -> None:
        """Count no more what was freed behind the last look."""
        if self.moving is not None:
            self.moving.sweep()

    def limits(self) -> OffloadStats | None:
        """Host memory; None before there is a plan."""
        if self.moving is None:
            return None
        slabs, refused = self.moving.slabs, self.moving.refused
        return OffloadStats(slabs.size, slabs.limit, refused.bytes, refused.peak)
