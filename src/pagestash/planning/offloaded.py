"""Bytes of offloaded groups on the device and on the host, as the keeper's window moves them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import add, sub
from typing import NamedTuple

from pagestash.planning.home_bytes import HomeBytes
from pagestash.planning.lifetimes import Life, MeasuredStep
from pagestash.policy import HomeName
from pagestash.profiling.copies import Played
from pagestash.profiling.groups import Move
from pagestash.saved.offload.plan import Event, Key


class OffloadedGroup(NamedTuple):
    """A group, and what of its bytes nothing else holds."""

    move: Move
    saved: tuple[tuple[int, int], ...]
    """What it takes until it is put: storages that nothing keeps and no later group has, storages of which only its
    thin slices are saved, and those slices: saved when, and bytes."""
    own_bytes: int
    """What it takes from then on, until it leaves: without storages of which only slices are saved."""
    leaving_bytes: int
    """What of it is free when the group has left: not what its rule's `fraction` keeps."""


class Offloaded:
    """The groups of one policy."""

    def __init__(self, step: MeasuredStep, homes: Mapping[int, HomeName], moves: Sequence[Move]) -> None:
        self._step, self._homes, self._moves = step, homes, moves
        # A storage that several groups have entries of is free when the last of them has left.
        self._holders = {storage: move for move in moves for storage in move.storages}
        self._sliced = {
            part.storage: move for move in moves for part in move.slices if part.storage not in self._holders
        }
        """By storage of which only slices are saved: the last group that has one."""
        self._whole = [self._lives(move, self._holders, move.storages) for move in moves]
        """Of each group: the storages that are counted with it."""
        self.groups = [self._group(move, lives) for move, lives in zip(moves, self._whole)]

    def _group(self, move: Move, lives: Mapping[int, Life]) -> OffloadedGroup:
        sliced = self._lives(move, self._sliced, dict.fromkeys(part.storage for part in move.slices))
        slices = [(part.saved_at, part.bytes) for part in move.slices]
        kept = sum(life.bytes for storage, life in lives.items() if storage not in move.leaving)
        own = sum(life.bytes for life in lives.values()) + sum(size for _, size in slices)
        held = [(life.saved_at, life.bytes) for life in (*lives.values(), *sliced.values())]
        return OffloadedGroup(move, (*held, *slices), own, own - kept)

    def _lives(self, move: Move, owners: Mapping[int, Move], storages: Iterable[int]) -> dict[int, Life]:
        """Of these storages, those that leave in the end and are counted with this group."""
        return {
            storage: self._step.lives[storage]
            for storage in storages
            if self._homes.get(storage) == "offload" and owners.get(storage) is move
        }

    def headroom(self, held: HomeBytes, pool: int) -> dict[Event, int]:
        """How far the keeper's measured step is from its peak after each put; see `offload/headroom.py`.

        In that step what leaves is gone at once. Gradients are what `floor` grows by in backward.
        """
        step, moves = self._step, self._moves
        if not step.reads_allocator or not moves:
            return {}
        changes = list(map(add, held.changes["keep"], held.changes["recompute"]))
        if any(held.changes["stash"]):
            changes = list(map(add, changes, held.changes["stash"]))
        for group, lives in zip(self.groups, self._whole):
            spans = [(saved_at, group.move.put_at - 1, size) for saved_at, size in group.saved]
            spans += [(life.needed_at, life.freed_at, life.bytes) for life in lives.values()]
            for first, last, size in spans:
                changes[first] += size
                changes[last + 1] -= size
        level = list(map(add, accumulate(changes), step.extra))
        turn = step.turn
        backward = max(1, turn)
        beside = max([*level[:turn], *map(sub, level[backward:], step.floor[backward - 1 :])])
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
            for part in group.move.slices:  # whose elements are spread as they were
                held.add("offload", part.needed_at, part.needed_at, part.span_bytes)
        fetched: set[Key] = set()
        changes = held.changes["offload"]
        away = {key: by_key[key].move.bytes for _, what, key in played.changes if what == "left"}
        for at, what, key in played.changes:
            move, _, own, leaves = by_key[key]
            if what == "put":
                changes[at] += own
            elif what == "left":
                changes[at] -= leaves
            elif what == "fetched":
                changes[at] += move.device_bytes
                fetched.add(key)
            else:
                changes[at] -= own
                if key in fetched:
                    changes[at] -= move.device_bytes - leaves
                elif key in away:  # or leaving still, if nobody asked for it
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
