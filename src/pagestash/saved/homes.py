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


class Keep:
    """Leaves tensors where they are, and counts the storages it keeps alive."""

    name: HomeName = "keep"

    def __init__(self) -> None:
        self.tally = Tally()
        self._held: dict[int, _Held] = {}

    def put(self, group: Sequence[Entry]) -> None:
        for entry in group:
            assert entry.origin is not None
            storage = entry.origin.untyped_storage()
            entry.place = storage._cdata
            held = self._held.setdefault(entry.place, _Held(entry.region, storage.nbytes()))
            held.entries += 1
            if held.entries == 1:
                self.tally.count(held.region, held.size)

    def get(self, entry: Entry) -> torch.Tensor:
        return entry.source().view(-1)

    def drop(self, entry: Entry) -> None:
        held = self._held[entry.place]
        held.entries -= 1
        if not held.entries:
            del self._held[entry.place]
            self.tally.count(held.region, -held.size)
        entry.origin = None


@dataclass(slots=True)
class _Held:
    """A storage that is kept, for the region that first saved a tensor in it."""

    region: str
    size: int
    entries: int = 0
