"""Replays of recomputed regions: when each happens, what runs again, and what that brings back.

A recomputed region R is replayed when backward first asks for something of it, in segment j. That takes its
forward's time again, up to the last tensor that is wanted, and memory is then at most

    base + beside(R) + bytes of each home(j) without R's  +  what memory grew by in R's forward

where beside(R) is what the profile read beside saved tensors at that request. What was recomputed stays until
backward is done with it. So do the inputs of R, which are held for the replay.

An input of R that another recomputed region makes comes back by a replay of that region, which R's replay asks for.
If no operation saves it, it is there while R's replay runs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pagestash.planning.home_bytes import HomeBytes
from pagestash.planning.lifetimes import Life, MeasuredStep
from pagestash.policy import HomeName
from pagestash.profiling.assign import Recomputing
from pagestash.profiling.records import Region

FUSED_SHARE = 2 / 3
"""Part of its forward that a fused region repeats for one tensor of its own: of three products of gated experts,
the first two."""


class Replay(NamedTuple):
    """One recomputed region: when it is replayed, and what that brings back."""

    region: Region
    begun: int
    """The first segment that runs again."""
    storages: tuple[int, ...]
    lives: Sequence[Life]
    """Of these storages."""
    back_bytes: int
    """Their sum."""
    most_bytes: int
    """The most that the replay takes: what memory grew by in the segments that run again."""
    first: int
    """The segment of backward that asks for it, and the number of that request."""
    request: int
    ends: Mapping[int, int]
    """The last segment in which each storage is there."""
    seconds: float
    """Of the segments that run again, as they took in forward."""
    device_seconds: float
    host_seconds: float


Owner = tuple[str, int]
"""A region, and the number of its call: a module may run in several places."""
KnownReplays = dict[tuple[str, int, tuple[int, ...], bool], Replay]
"""By owner, storages, and whether it runs to its end: a replay that is asked for by nothing but their backward. No
policy changes it, so it is found once for a step."""


class Spike(NamedTuple):
    """Memory while a replay runs."""

    at: int
    """The segment."""
    beside: int
    """Bytes beside saved tensors then."""
    most: int
    """Bytes of the replay at its most."""
    back: int
    """Of what it brings back."""


class Replays:
    """The replays of one policy."""

    def __init__(
        self,
        step: MeasuredStep,
        recomputing: Recomputing,
        homes: Mapping[int, HomeName],
        known: KnownReplays,
    ) -> None:
        self._step, self._recomputing, self._homes = step, recomputing, homes
        self._known = known

    def find(self) -> list[Replay]:
        """All of them."""
        owners: dict[int, Owner] = {}
        owned: dict[Owner, list[int]] = {}
        for storage, home in self._homes.items():
            if home == "recompute" or storage in self._recomputing.discarded:
                owners[storage] = owner = self._owner(storage)
                owned.setdefault(owner, []).append(storage)
        remaking = self._remaking(owned)
        found: dict[Owner, Replay] = {}
        for own in (*owned, *sorted(remaking - owned.keys())):
            key = *own, tuple(owned.get(own, ())), own in remaking
            if key not in self._known:
                self._known[key] = self._replay(*key)
            found[own] = self._known[key]
        # A replay needs its inputs: those that are themselves recomputed come back with it.
        for own in sorted(found, key=lambda owner: (found[owner].begun, owner), reverse=True):
            replay = found[own]
            when, beside = (replay.first, replay.request), 0
            for maker, size in self._chained(replay.region, owners):
                beside += size
                if when < (found[maker].first, found[maker].request):
                    found[maker] = found[maker]._replace(first=when[0], request=when[1])
            if beside:
                found[own] = replay._replace(most_bytes=replay.most_bytes + beside)
        if not self._step.halves:
            return list(found.values())
        return [half for replay in found.values() for half in self._halves(replay)]

    def _chained(self, region: Region, owners: Mapping[int, Owner]) -> Iterator[tuple[Owner, int]]:
        """The replays that bring the region's inputs back, and the bytes of those that nobody saves."""
        makers, homes = self._recomputing.makers, self._homes
        for storage in region.inputs:
            if storage in makers and homes.get(storage) == "recompute":
                yield owners[storage], 0
        for _, size, maker in self._recomputing.remade_for(region):
            yield (maker.name, 0), size

    def _remaking(self, owned: Iterable[Owner]) -> set[Owner]:
        """The replays that make unsaved inputs of others, and run to the end of their regions for that."""
        found: set[Owner] = set()
        left = [name for name, _ in owned]
        while left:
            for _, _, maker in self._recomputing.remade_for(self._recomputing.regions[left.pop()]):
                if (maker.name, 0) not in found:
                    found.add((maker.name, 0))
                    left.append(maker.name)
        return found

    def _replay(self, name: str, call: int, storages: tuple[int, ...], whole: bool) -> Replay:
        """The replay that brings these storages back, when their own backward asks for it."""
        step, region = self._step, self._recomputing.regions[name]
        lives = [step.lives[storage] for storage in storages]
        # (One that brings nothing back but an input of another is asked for by that one alone.)
        first, request = min(((life.needed_at, life.request) for life in lives), default=(step.count, 0))
        forward, share = self._repeated(region, call, storages, whole)
        back = sum(life.bytes for life in lives)
        return Replay(
            region=region,
            begun=min(forward, default=0),
            storages=storages,
            lives=lives,
            back_bytes=back,
            most_bytes=max(back, self._growth(forward)),
            first=first,
            request=request,
            ends={storage: life.freed_at for storage, life in zip(storages, lives)},
            seconds=share * sum(step.seconds[at] for at in forward),
            device_seconds=share * sum(step.lanes.device[at] for at in forward),
            host_seconds=share * sum(step.lanes.host[at] for at in forward),
        )

    def inputs(self, replays: Sequence[Replay]) -> dict[int, dict[str, tuple[int, int]]]:
        """By storage that moves as an input of a replayed region, and the region around that, with which it moves:
        when the first replay asks for it."""
        found: dict[int, dict[str, tuple[int, int]]] = {}
        for replay in replays:
            name = replay.region.name
            if self._recomputing.home_around(name, replay.region.path) == "keep":
                continue  # it holds its inputs on the device, also those that another region moves
            around, when = self._recomputing.region_around(name), (replay.first, replay.request)
            for storage in replay.region.inputs:
                asked = found.setdefault(storage, {})
                asked[around] = min(when, asked.get(around, when))
        return found

    def _halves(self, replay: Replay) -> list[Replay]:
        """The replay, or one for each half of a split backward: what the first asked for is gone after it."""
        halves = {at: self._step.halves[at] for at in replay.storages if at in self._step.halves}
        if not halves:
            return [replay]
        ends = {storage: done for storage, (done, _) in halves.items()}
        again = min(begins for _, begins in halves.values())
        return [replay._replace(ends=ends), replay._replace(first=again)]

    def _owner(self, storage: int) -> Owner:
        """The region whose replay brings the storage back, and the number of its call."""
        maker = self._recomputing.makers.get(storage)
        if maker is not None and self._homes[storage] == "recompute":
            name, within = maker.name, maker.within
        else:
            name = self._recomputing.discarded[storage]
            within = self._recomputing.regions[name].within
        calls, at = self._step.calls_of(within), self._step.lives[storage].saved_at
        # (What a later region saves is the output of the last call before.)
        return name, max(0, sum(call[0] <= at for call in calls) - 1) if len(calls) > 1 else 0

    def _repeated(
        self, region: Region, call: int, storages: Sequence[int], whole: bool
    ) -> tuple[Sequence[int], float]:
        """The forward segments that run again for these storages, and what part of their time."""
        calls = self._step.calls_of(region.within)
        forward: Sequence[int] = calls[call] if calls else ()
        if region.within != region.name:
            return forward, FUSED_SHARE
        if not whole and not any(storage in region.outputs for storage in storages):
            last = max(self._step.lives[storage].saved_at for storage in storages)
            forward = [at for at in forward if at <= last]
        return forward, 1.0

    def come_back(self, replay: Replay, held: HomeBytes) -> Spike:
        """Count what the replay brings back; the memory that it takes meanwhile."""
        first, changes = replay.first, held.changes["recompute"]
        for storage, life in zip(replay.storages, replay.lives):
            # Else its home has it meanwhile, and a replay makes another.
            if self._homes[storage] == "recompute":
                changes[life.saved_at] += life.bytes
                changes[life.last_saved_at + 1] -= life.bytes
            changes[max(first, replay.ends[storage]) + 1] -= life.bytes
        changes[first] += replay.back_bytes
        held.add("recompute", first, first, self._step.permuted.get(replay.region.name, 0))
        return Spike(first, self._beside(first, replay.lives), replay.most_bytes, replay.back_bytes)

    def _beside(self, at: int, lives: Sequence[Life]) -> int:
        """Bytes beside saved tensors when backward first asks for one of these, in segment `at`.

        Of those that it asks for in one segment, the one that was saved last comes first.
        """
        asked = [life for life in lives if life.needed_at == at and life.beside_bytes is not None]
        if asked:
            return max(asked, key=lambda life: life.saved_at).beside_bytes or 0
        return max(self._step.floor[max(0, at - 1) : at + 1])

    def _growth(self, forward: Sequence[int]) -> int:
        """What memory grew by in these segments of forward; 0 where it is not known."""
        if not forward or not self._step.knows_memory:
            return 0
        segments, first = self._step.profile.segments, forward[0]
        before = (segments[first - 1].end_bytes or 0) if first else 0
        return max(segments[at].peak_bytes or 0 for at in forward) - before
