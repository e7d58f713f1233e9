"""Bytes of stashed tensors, the copies to pages and back, and the pool of pages."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil

from pagestash.planning.home_bytes import HomeBytes
from pagestash.planning.lanes import Lanes
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.prediction import RuleTable
from pagestash.planning.skew import PoolSize
from pagestash.policy import HomeName


class Stashed:
    """The storages that a keeper copies to pages, under one policy."""

    def __init__(
        self,
        step: MeasuredStep,
        rules: RuleTable,
        homes: Mapping[int, HomeName],
        when_saved: Sequence[HomeName],
    ) -> None:
        self._step, self._rules, self._homes = step, rules, homes
        self._storages = self._find(when_saved)

    @property
    def host_seconds(self) -> float:
        """What the host takes for all copies."""
        cost = self._step.overhead
        return len(self._storages) * (cost.put + cost.get)

    def count(self, lanes: Lanes, held: HomeBytes) -> PoolSize:
        """The pool. What copies take is added to the segments."""
        pages = [0] * (self._step.count + 1)
        page = self._rules.pool.page_bytes
        for storage, (size, first, last) in self._storages.items():
            life = self._step.lives[storage]
            copy = size / self._step.profile.link.copy
            lanes.add(life.last_saved_at, device=copy, host=self._step.overhead.put)
            lanes.add(first, device=copy, host=self._step.overhead.get)
            if self._homes[storage] == "stash":
                held.add("stash", life.saved_at, life.last_saved_at, life.bytes)
            held.add("stash", first, last, life.bytes)
            held.add("stash", first, first, self._step.permuted.get(life.path[-1], 0))
            pages[life.last_saved_at] += -(-size // page)
            pages[last + 1] -= -(-size // page)
        return self._pool_size(max(accumulate(pages)))

    def _find(self, when_saved: Sequence[HomeName]) -> dict[int, tuple[int, int, int]]:
        """Bytes of each, and the segments from the first request to the last.

        Some have another home, too: a later region keeps them, or they are recomputed for a region around.
        """
        found: dict[int, tuple[int, int, int]] = {}
        if "stash" not in when_saved:
            return found
        for tensor, home in zip(self._step.profile.tensors, when_saved):
            life = self._step.lives.get(tensor.storage)
            if home != "stash" or life is None or tensor.storage in self._step.rows.heads:
                continue
            size, first, last = life.valid_bytes, life.needed_at, life.freed_at
            if self._homes[tensor.storage] != "stash":
                own = [at for at in self._step.backward_of(tensor.region) if first <= at <= last] or [last]
                size, first, last = min(tensor.bytes, tensor.valid_bytes), own[0], own[-1]
            known = found.get(tensor.storage, (size, first, last))
            found[tensor.storage] = max(size, known[0]), min(first, known[1]), max(last, known[2])
        return found

    def _pool_size(self, most: int) -> PoolSize:
        """The pool, if the measured step needs `most` pages."""
        config = self._rules.pool
        if config.device_bytes is not None:
            return PoolSize(config.device_bytes if self._rules.rules else 0)
        if self._step.skew is None:
            return PoolSize(ceil(config.headroom * most) * config.page_bytes)
        lives, rows = self._step.lives, self._step.rows
        paged = {
            storage: home
            for storage, home in self._homes.items()
            if home == "stash" or (home == "offload" and storage in rows.tensors)
        }
        changes = [0] * (self._step.count + 1)
        for storage in paged:
            changes[lives[storage].last_saved_at] += lives[storage].bytes
            changes[lives[storage].freed_at + 1] -= lives[storage].bytes
        level = list(accumulate(changes))
        highest = max(level)
        # The same number of pairs may be live several times, in a pipeline with other microbatches each time.
        peaks = [at for at, now in enumerate(level) if now == highest and (not at or level[at - 1] < now)]
        at = peaks[0]
        live = {s: home for s, home in paged.items() if lives[s].last_saved_at <= at <= lives[s].freed_at}
        fixed = sum(-(-lives[s].valid_bytes // config.page_bytes) for s in live if s not in rows.tensors)
        return self._step.skew.pool(
            live, rows, ceil(config.headroom * fixed), config.page_bytes, chances=len(peaks)
        )
