"""Bytes of offloaded groups on the device and on the host, as the keeper's window moves them."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from pagestash.planning.home_bytes import HomeBytes
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.policy import HomeName
from pagestash.profiling.copies import Move, Played
from pagestash.saved.offload.plan import Event, Key


class Offloaded:
    """The groups of one policy."""

    def __init__(self, step: MeasuredStep, homes: Mapping[int, HomeName], moves: Sequence[Move]) -> None:
        self._step, self._homes, self._moves = step, homes, moves

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
        by_key = {move.key: move for move in self._moves}
        self._until_put(held)
        fetched: set[Key] = set()
        changes = held.changes["offload"]
        away: dict[Key, int] = {}
        for at, what, key in played.changes:
            move = by_key[key]
            freed = {s: self._step.lives[s].bytes for s in move.storages if self._homes.get(s) == "offload"}
            own = sum(freed.values()) + move.slice_bytes
            leaves = (
                sum(size for storage, size in freed.items() if storage in move.leaving) + move.slice_bytes
            )
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

    def _until_put(self, held: HomeBytes) -> None:
        """Count what is saved until its group is put."""
        for move in self._moves:
            for storage in move.storages:
                if self._homes.get(storage) == "offload":
                    life = self._step.lives[storage]
                    held.add("offload", life.saved_at, move.put_at - 1, life.bytes)
            for saved_at, size in move.slices:
                held.add("offload", saved_at, move.put_at - 1, size)


def _most_on_host(played: Played, away: Mapping[Key, int]) -> int:
    """Host memory is taken when a copy out begins."""
    host = most = 0
    for _, what, key in played.changes:
        if key in away and what in ("put", "dropped"):
            host += away[key] if what == "put" else -away[key]
            most = max(most, host)
    return most
