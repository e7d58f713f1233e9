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
        if self.bytes > self.peak:
            self.peak = self.bytes
        now, peak = self.by_region.get(region, (0, 0))
        now += change
        self.by_region[region] = (now, now if now > peak else peak)

    def reset_peak(self) -> None:
        self.peak = self.bytes
        self.by_region = {region: (now, now) for region, (now, _) in self.by_region.items() if now}


@dataclass(slots=True, eq=False)
class Held:
    """A storage that is kept, for the region that first saved a tensor in it, at the version last saved.

    That is None while it stays by the decision of another home alone.
    """

    keep: "Keep"
    key: int
    region: str
    size: int
    version: int | None
    holders: int = 1

    def let_go(self) -> None:
        """A holder is gone."""
        self.holders -= 1
        if not self.holders:
            self.keep.forget(self)


class Keep:
    """Leaves tensors where they are, and counts the storages it keeps alive."""

    name: HomeName = "keep"

    def __init__(self) -> None:
        self.tally = Tally()
        self._held: dict[int, Held] = {}
        self._earlier: set[Held] = set()

    def hold(self, key: int, tensor: torch.Tensor, version: int | None, region: str) -> Held:
        """Count a holder of the tensor's storage; the holder keeps it alive itself, and says when it lets go.

        `key` and `version` are the tensor's: the caller knows them, and each costs a call.
        """
        held = self._held.get(key)
        if held is None:
            size = tensor.untyped_storage().nbytes()
            held = self._held[key] = Held(self, key, region, size, version)
            self.tally.count(region, size)
        else:
            held.holders += 1
            if version is not None:
                held.version = version
        return held

    def forget(self, held: Held) -> None:
        """Nobody holds the storage any more, or it counts no longer."""
        if self._held.get(held.key) is held:
            del self._held[held.key]
            self.tally.count(held.region, -held.size)

    def forget_step(self) -> None:
        """A step is over. What is held from here on, until the next one begins, is of an earlier one."""
        self._earlier = set(self._held.values())

    def give_up(self) -> None:
        """Count nothing any more of what is held since the last step: it ends when a failed graph does."""
        for held in set(self._held.values()) - self._earlier:
            self.forget(held)

    def holds(self, key: int, version: int) -> bool:
        """Whether a storage is kept as it was at `version`, whatever other homes decide.

        (Else what a plan lets stay would change what is saved next, and so the order that the plan was made from.)
        """
        held = self._held.get(key)
        return held is not None and held.version == version

    def put(self, group: Sequence[Entry]) -> None:
        """Entries of another home, which stay for now."""
        for entry in group:
            origin = entry.origin
            assert origin is not None
            entry.place = self.hold(origin.untyped_storage()._cdata, origin, None, entry.region)

    def get(self, entry: Entry) -> torch.Tensor:
        return entry.source().view(-1)

    def drop(self, entry: Entry) -> None:
        entry.place.let_go()
        entry.origin = None
