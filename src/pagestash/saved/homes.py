"""Homes: where saved tensors wait. A home is three methods: `put` a group, `get` an entry, `drop` it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pagestash.policy import HomeName
from pagestash.saved.identity import Entry


class Home(Protocol):
    """Takes the entries of a region when it ends, and gives their bytes back in backward.

    `put` decides on each entry's `place` and lets go of its `origin`; `get` returns the entry's bytes, flat, as
    often as asked; `drop` is called once, when nothing can ask any more, from whichever thread that is.
    """

    name: HomeName

    def put(self, group: Sequence[Entry]) -> None: ...

    def get(self, entry: Entry) -> torch.Tensor: ...

    def drop(self, entry: Entry) -> None: ...


class Tally:
    """Bytes that wait in a home now and at their peak, in all and by region."""

    def __init__(self) -> None:
        self.bytes = 0
        self.peak = 0
        self.by_region: dict[str, tuple[int, int]] = {}
        """Bytes now and at their peak."""

    def count(self, region: str, change: int) -> None:
        self.bytes += change
        self.peak = max(self.peak, self.bytes)
        now, peak = self.by_region.get(region, (0, 0))
        self.by_region[region] = (now + change, max(peak, now + change))

    def reset_peak(self) -> None:
        self.peak = self.bytes
        self.by_region = {region: (now, now) for region, (now, _) in self.by_region.items() if now}


@dataclass(slots=True, eq=False)
class Held:
    """A storage that is kept, for the region that first saved a tensor in it, at the version last saved."""

    key: int
    region: str
    size: int
    version: int
    holders: int = 0


class Keep:
    """Leaves tensors where they are, and counts the storages it keeps alive."""

    name: HomeName = "keep"

    def __init__(self) -> None:
        self.tally = Tally()
        self._held: dict[int, Held] = {}

    def hold(self, tensor: torch.Tensor, region: str) -> Held:
        """Count a holder of the tensor's storage; the holder keeps it alive itself, and says when it lets go."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = Held(key, region, storage.nbytes(), 0)
            self.tally.count(region, held.size)
        held.version = tensor._version
        held.holders += 1
        return held

    def release(self, held: Held) -> None:
        held.holders -= 1
        if not held.holders:
            del self._held[held.key]
            self.tally.count(held.region, -held.size)

    def holds(self, key: int, version: int) -> bool:
        """Whether a storage is kept as it was at `version`."""
        held = self._held.get(key)
        return held is not None and held.version == version

    def put(self, group: Sequence[Entry]) -> None:
        for entry in group:
            assert entry.origin is not None
            entry.place = self.hold(entry.origin, entry.region)

    def get(self, entry: Entry) -> torch.Tensor:
        return entry.source().view(-1)

    def drop(self, entry: Entry) -> None:
        self.release(entry.place)
        entry.origin = None
