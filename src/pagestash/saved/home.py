"""Homes: a home takes the entries of a region when it ends, and gives each a place where its bytes wait."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pagestash.policy import HomeName
from pagestash.saved.storage import Entry
from pagestash.torch_internals import storage_key


@dataclass(frozen=True, slots=True)
class HomeStats:
    """Valid bytes that wait in a home now, and at the peak since the last `reset_peaks`.

    Of `recompute`: what was recomputed and has not been asked for yet. What it discarded is nowhere.
    """

    bytes: int
    peak: int


class Tally:
    """Bytes that wait in a home now and at their peak, in all and by region."""

    def __init__(self) -> None:
        self.bytes = 0
        self.peak = 0
        self.by_region: dict[str, list[int]] = {}
        """Bytes now and at their peak."""

    def count(self, region: str, change: int) -> None:
        self.bytes += change
        if self.bytes > self.peak:
            self.peak = self.bytes
        sizes = self.by_region.get(region)
        if sizes is None:
            self.by_region[region] = [change, max(0, change)]
            return
        now = sizes[0] = sizes[0] + change
        if now > sizes[1]:
            sizes[1] = now

    def reset_peak(self) -> None:
        self.peak = self.bytes
        self.by_region = {region: [now, now] for region, (now, _) in self.by_region.items() if now}


class Home:
    """Where saved tensors of a rule wait. In every step: `start`, then groups are put, then `settle` and `commit`.

    What a home has to measure before it can work at full speed, it measures in its first step.
    """

    name: HomeName

    def __init__(self) -> None:
        self.tally = Tally()

    @property
    def live(self) -> bool:
        """Whether a backward is still to come."""
        return self.tally.bytes > 0

    def start(self) -> None:
        """A step begins."""

    def settle(self) -> None:
        """A step is over: the current stream has waited for the home's own streams."""

    def give_up(self) -> None:
        """The step was ended by an exception, and `settle` comes next: nothing of it will be asked for."""

    def commit(self) -> None:
        """Between steps, after one that came to its end: use what it has shown."""

    def held(self) -> int | torch.Tensor:
        """Valid bytes that wait now; a device integer where the host does not know."""
        return self.tally.bytes

    def reset_peaks(self) -> None:
        """Count peaks from now on."""
        self.tally.reset_peak()

    def stats(self) -> HomeStats:
        """In all. Waits for the device."""
        return HomeStats(self.tally.bytes, self.tally.peak)

    def regions(self) -> dict[str, HomeStats]:
        """By region. Waits for the device."""
        return {name: HomeStats(*sizes) for name, sizes in self.tally.by_region.items()}


class TakesGroups(Protocol):
    """A home that moves the tensors it is given."""

    def put(self, group: Sequence[Entry]) -> None:
        """Take the entries of a region that is over.

        Sets the `place` of each, and lets go of its `origin` unless the bytes stay there.
        """
        ...


class Lost:
    """The place of entries that were given up."""

    def get(self, entry: Entry) -> torch.Tensor:
        raise RuntimeError(
            f"backward asks for a tensor of region {entry.region!r} whose step ended by an exception, which gave "
            "up all that the step had saved; run forward again"
        )

    def drop(self, entry: Entry) -> None:
        """Its home has let go of it already."""


def give_up(entries: Iterable[Entry]) -> None:
    """Take the entries of a step that ended by an exception out of their places; whoever asks for one is told.

    Autograd holds the failed graph until the thread's next backward, and the next step would find neither their
    pages nor their host memory.
    """
    lost = Lost()
    for entry in entries:
        if entry.handles:
            # (Taken out first: its last handle may die before the place has begun to drop it.)
            place, entry.place = entry.place, lost
            if place is not None:
                place.drop(entry)
            entry.place, entry.origin = lost, None


@dataclass(slots=True, eq=False)
class KeptStorage:
    """A storage that is kept alive. It counts for the region that saved it first, and is the place of entries that
    stay."""

    keep: "Keep"
    key: int
    region: str
    size: int
    version: int | None
    """When a tensor in it was last saved where nothing moves; None: only entries of other homes stay in it."""
    holders: int = 1

    def let_go(self) -> None:
        """A holder is gone."""
        self.holders -= 1
        if not self.holders:
            self.keep.forget(self)

    def get(self, entry: Entry) -> torch.Tensor:
        return entry.here()

    def drop(self, entry: Entry) -> None:
        self.let_go()
        entry.origin = None


class Keep(Home):
    """Leaves tensors where they are, and counts the storages it keeps alive."""

    name: HomeName = "keep"

    def __init__(self) -> None:
        super().__init__()
        self.by_storage: dict[int, KeptStorage] = {}
        """The storages that are kept, by their keys."""
        self._earlier: set[KeptStorage] = set()

    def hold(self, key: int, tensor: torch.Tensor, version: int | None, region: str) -> KeptStorage:
        """Count a holder of the tensor's storage; the holder keeps it alive itself, and says when it lets go.

        `key` and `version` are the tensor's: the caller knows them, and each costs a call.
        """
        held = self.by_storage.get(key)
        if held is None:
            size = tensor.untyped_storage().nbytes()
            held = self.by_storage[key] = KeptStorage(self, key, region, size, version)
            self.tally.count(region, size)
        else:
            held.holders += 1
            if version is not None:
                held.version = version
        return held

    def forget(self, held: KeptStorage) -> None:
        """Nobody holds the storage any more, or it counts no longer."""
        self._earlier.discard(held)
        if self.by_storage.get(held.key) is held:
            del self.by_storage[held.key]
            self.tally.count(held.region, -held.size)

    def settle(self) -> None:
        """What is held from here on, until the next one begins, is of an earlier one."""
        self._earlier = set(self.by_storage.values())

    def give_up(self) -> None:
        """Count nothing of what the step held: it ends when the failed graph does."""
        for held in set(self.by_storage.values()) - self._earlier:
            self.forget(held)

    def stay(self, entry: Entry) -> KeptStorage:
        """The place of an entry of another home that leaves its bytes where they are."""
        origin = entry.origin
        assert origin is not None
        return self.hold(storage_key(origin), origin, None, entry.region)
