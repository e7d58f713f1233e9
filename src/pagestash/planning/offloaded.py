"""Bytes of offloaded groups on the device and on the host, as the keeper's window moves them."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from pagestash.planning.home_bytes import HomeBytes
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.policy import HomeName
from pagestash.profiling.copies import Move, Played
from pagestash.saved.offload.plan import Event, Key


class OffloadedGroup(NamedTuple):
    """A group, and what of its bytes nothing else holds."""

    move: Move
    saved: tuple[tuple[int, int], ...]
    """Storages that no other region keeps, and thin slices: saved when, and bytes."""
    own_bytes: int
    """Their sum: on the device until the group leaves."""
    leaving_bytes: int
    """What of it is free when the group has left: not what its rule's `fraction` keeps."""


class Offloaded:
    """The groups of one policy."""

    def __init__(self, step: MeasuredStep, homes: Mapping[int, HomeName], moves: Sequence[Move]) -> None:
        self._step, self._homes, self._moves = step, homes, moves
        self.groups = [self._group(move) for move in moves]

    def _group(self, move: Move) -> OffloadedGroup:
        lives = {s: self._step.lives[s] for s in move.storages if self._homes.get(s) == "offload"}
        saved = (*((life.saved_at, life.bytes) for life in lives.values()), *move.slices)
        kept = sum(life.bytes for storage, life in lives.items() if storage not in move.leaving)
        own = sum(size for _, size in saved)
        return OffloadedGroup(move, saved, own, own - kept)

    def headroom(self, held: HomeBytes, pool: int) -> dict[Event, int]:
        """How far the keeper's measured step is from its peak after each put; see `offload/headroom.py`.

        In that step what leaves is gone at once. Gradients are what `floor` grows by in backward.
        """
        step, moves = self._step, self._moves
        if not step.reads_allocator or not moves:
            return {}
        changes = list(held.changes["keep"])
        for home in ("stash", "recompute"):
            changes = [one + other for one, other in zip(changes, held.changes[home])]
        for move in moves:
            for storage in move.storages:
                life = step.lives.get(storage)
                if life is not None and self._homes[storage] == "offload":
                    for first, last in ((life.saved_at, move.put_at - 1), (life.needed_at, life.freed_at)):
                        changes[first] += life.bytes
                        changes[last + 1] -= life.bytes
        level = [alive + extra for alive, extra in zip(accumulate(changes), step.extra)]
        turn = step.turn
        beside = max(
            [*level[:turn], *(level[at] - step.floor[at - 1] for at in range(max(1, turn), step.count))]
        )
        most = max(level)
        puts = sorted((move.put_at, move.key) for move in moves)
        ends = [at for at, _ in puts[1:]] + [min(move.asked_at[0] for move in moves)]
        found: dict[Event, int] = {}
        for (at, key), end in zip(puts, ends):
            peak = max(level[at : max(at + 1, end)])
            found["put", key] = max(0, min(most, beside) - peak - pool)
        return found

    def count(self, played: Played, held: HomeBytes) -> int:
        """Count what the groups take; returns the most bytes on the host."""
        by_key = {group.move.key: group for group in self.groups}
        for group in self.groups:
            for saved_at, size in group.saved:
                held.add("offload", saved_at, group.move.put_at - 1, size)
        fetched: set[Key] = set()
        changes = held.changes["offload"]
        away: dict[Key, int] = {}
        for at, what, key in played.changes:
            move, _, own, leaves = by_key[key]
            if what == "put":
                changes[at] += own
            elif what == "left":
                changes[at] -= leaves
                away[key] = move.bytes
            elif what == "fetched":
                changes[at] += move.device_bytes
                fetched.add(key)
            else:
                changes[at] -= own
                if key in fetched:
                    changes[at] -= move.device_bytes - leaves
                elif key in away:
                    changes[at] += leaves
        return _most_on_host(played, away)


def _most_on_host(played: Played, away: Mapping[Key, int]) -> int:
    """Host memory is taken when a copy out begins."""
    host = most = 0
    for _, what, key in played.changes:
        if key in away and what in ("put", "dropped"):
            host += away[key] if what == "put" else -away[key]
            most = max(most, host)
    return most
