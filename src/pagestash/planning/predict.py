"""What a step would take under a policy: time, memory in every segment, waits, use of the link.

Nothing runs. The measured segments of a profile are played with the decisions that a keeper would make: homes by
`profiling/assign.py`, offload by the keeper's own window (`profiling/copies.py`). With, for segment s,

    alive(s)      bytes of saved tensors without a policy: saved in s or before, freed in s or later
    extra(s)      = peak(s) - alive(s): workspace, gradients, what else lives; 0 where the profile has no memory
    floor(s)      = end(s) - bytes of saved tensors alive after s: what of that is left at the segment's end

memory in s under a policy is `base + extra(s) + bytes of each home(s)`. A recomputed region R is replayed when
backward first asks for something of it, in segment j. That takes its forward's time again, up to the last tensor
that is wanted, and memory is then at most

    base + beside(R) + bytes of each home(j) without R's  +  what memory grew by in R's forward

where beside(R) is what the profile read beside saved tensors at that request. What was recomputed stays until
backward is done with it. So do the inputs of R, which are held for the replay.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

from pagestash.planning.lanes import Lanes
from pagestash.planning.lifetimes import Life, MeasuredStep
from pagestash.planning.prediction import Cost, Prediction, RuleTable
from pagestash.planning.skew import PoolSize
from pagestash.policy import HOMES, HomeName, Policy
from pagestash.profiling.assign import Recomputing, assign_when_saved
from pagestash.profiling.copies import Move, Played, moves_of, plan_of, play
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.records import Region
from pagestash.saved.offload.plan import Event, Key, OffloadPlan

FUSED_SHARE = 2 / 3
"""Part of its forward that a fused region repeats for one tensor of its own: of three products of gated experts,
the first two."""


def predict(profile: ProfiledStep, policy: Policy, *, base_bytes: int = 0) -> Prediction:
    """The profiled step under `policy`; `base_bytes` is what the device holds before it: weights and so on."""
    policy.check(region.name for region in profile.regions)
    step = MeasuredStep(profile, base_bytes)
    return Predictor(step).predict(RuleTable.of(policy, profile.regions))


class Predictor:
    """Predicts many policies for one measured step."""

    def __init__(self, step: MeasuredStep) -> None:
        self.step = step
        self.count = 0
        """Predictions so far."""

    @property
    def one(self) -> MeasuredStep:
        """The measured step, by whose regions policies are written."""
        return self.step

    def predict(self, rules: RuleTable) -> Prediction:
        self.count += 1
        return _Playing(self.step, rules).play()

    def cost(self, rules: RuleTable) -> Cost:
        """The policy's sums, which are faster to find."""
        return _Playing(self.step, rules).cost()


@dataclass(slots=True)
class _Replay:
    """One recomputed region: when it is replayed, and what that brings back."""

    region: Region
    forward: Sequence[int]
    """Segments that run again."""
    storages: list[int]
    first: int
    seconds: float
    """Of the segments that run again, as they took in forward."""
    device_seconds: float
    host_seconds: float


class _Playing:
    """One policy on one measured step."""

    def __init__(self, step: MeasuredStep, rules: RuleTable) -> None:
        self.step, self.rules = step, rules
        profile = step.profile
        self.recomputing = Recomputing(rules, step.index, profile.regions)
        self.when_saved = assign_when_saved(rules, step.index, self.recomputing)
        self.homes = self._homes()
        self.pool = PoolSize()
        self.changes: dict[HomeName, list[int]] = {}
        self.spikes: list[tuple[int, int, int, int]] = []
        """Segment, bytes beside saved tensors then, of a replay at its most, and of what it brings back."""

    def play(self) -> Prediction:
        step = self.step
        self.changes = {home: [0] * (step.count + 1) for home in HOMES}
        replays = self._replays()
        lanes = (step.hooked_lanes if self.rules.rules else step.lanes).copy()
        for replay in replays:
            lanes.add(replay.first, device=replay.device_seconds, host=replay.host_seconds)
        stash_seconds, pool = self._stash(lanes)
        moves = moves_of(self.rules, step.profile.tensors, self.when_saved, step.segments, step.positions)
        self._hooks(lanes, replays, moves)
        seconds = lanes.seconds()
        self._keep()
        for replay in replays:
            self._come_back(replay)
        plan = plan_of(moves, step.at_once)
        plan.headroom = self._headroom(moves, plan, pool)
        played = play(moves, plan, seconds, step.profile.link)
        host = self._offload(moves, played)
        return self._result(replays, moves, plan, played, seconds, stash_seconds, pool, host)

    def cost(self) -> Cost:
        """Sums alone, without a timeline."""
        held = dict.fromkeys(HOMES, 0)
        for storage, home in self.homes.items():
            life = self.step.lives[storage]
            held[home] += life.valid_bytes if home == "stash" else life.bytes
        moved = {
            tensor.storage: tensor.valid_bytes
            for tensor, home in zip(self.step.profile.tensors, self.when_saved)
            if home == "offload"
        }
        if any(rule.home == "offload" and rule.fraction < 1.0 for rule in self.rules.rules.values()):
            step = self.step
            moves = moves_of(self.rules, step.profile.tensors, self.when_saved, step.segments)
            moved = {number: move.bytes for number, move in enumerate(moves)}
            held["keep"] += sum(move.kept_bytes for move in moves)
        unsaved = sum(size for _, size, _, _ in self._unsaved_inputs())
        replays = self._replays()
        back = [sum(self.step.lives[storage].bytes for storage in replay.storages) for replay in replays]
        return Cost(
            kept_bytes=held["keep"] + unsaved + int(self.rules.pool.headroom * held["stash"]),
            moved_bytes=sum(moved.values()),
            seconds=sum(replay.seconds for replay in replays)
            + len(replays) * self.step.exposed_overhead()
            + 2 * held["stash"] / self.step.profile.link.copy,
            recomputed_bytes=max(back, default=0),
        )

    def _homes(self) -> dict[int, HomeName]:
        """Where the bytes of each storage are in the end."""
        homes: dict[int, HomeName] = {}
        for tensor, home in zip(self.step.profile.tensors, self.when_saved):
            if tensor.storage not in self.step.lives:
                continue
            known = homes.get(tensor.storage, home)
            if "keep" in (known, home) or tensor.elsewhere or tensor.storage in self.recomputing.kept_inputs:
                homes[tensor.storage] = "keep"
            else:
                homes[tensor.storage] = "recompute" if "recompute" in (known, home) else known
        heads = (storage for storage in self.step.rows.heads if homes.get(storage) == "stash")
        return homes | dict.fromkeys(heads, "keep")

    def _add(self, home: HomeName, first: int, last: int, size: int) -> None:
        """So many bytes are there from segment `first` to `last`."""
        if last >= first:
            self.changes[home][first] += size
            self.changes[home][last + 1] -= size

    # --- keep and stash ---

    def _keep(self) -> None:
        for storage, home in self.homes.items():
            life = self.step.lives[storage]
            if home == "keep":
                self._add("keep", life.saved_at, life.freed_at, life.bytes)
        for storage, size, first, last in self._unsaved_inputs():
            if storage not in self.homes:
                self._add("keep", first, last, size)

    def _unsaved_inputs(self) -> Iterable[tuple[int, int, int, int]]:
        """Inputs that are held for replays alone: storage, bytes, and from when to when."""
        seen: set[int] = set()
        for region in self.recomputing.regions.values():
            span = self.step.span(region.name)
            for storage, size in region.unsaved_inputs:
                if storage not in seen and span is not None:
                    seen.add(storage)
                    yield storage, size, *span

    def _stash(self, lanes: Lanes) -> tuple[float, int]:
        """Seconds that copies on the device take, which are added to the segments, and bytes of the pool."""
        pages = [0] * (self.step.count + 1)
        took = 0.0
        page = self.rules.pool.page_bytes
        for storage, (size, first, last) in self._stashed().items():
            life = self.step.lives[storage]
            copy = size / self.step.profile.link.copy
            lanes.add(life.last_saved_at, device=copy, host=self.step.overhead.put)
            lanes.add(first, device=copy, host=self.step.overhead.get)
            took += 2 * copy
            if self.homes[storage] == "stash":
                self._add("stash", life.saved_at, life.last_saved_at, life.bytes)
            self._add("stash", first, last, life.bytes)
            pages[life.last_saved_at] += -(-size // page)
            pages[last + 1] -= -(-size // page)
        self.pool = self._pool_size(max(accumulate(pages)))
        return took, self.pool.bytes

    def _stashed(self) -> dict[int, tuple[int, int, int]]:
        """Storages that a keeper copies to pages: bytes, and the segments from the first request to the last.

        Some have another home, too: a later region keeps them, or they are recomputed for a region around.
        """
        found: dict[int, tuple[int, int, int]] = {}
        for tensor, home in zip(self.step.profile.tensors, self.when_saved):
            life = self.step.lives.get(tensor.storage)
            if home != "stash" or life is None or tensor.storage in self.step.rows.heads:
                continue
            size, first, last = life.valid_bytes, life.needed_at, life.freed_at
            if self.homes[tensor.storage] != "stash":
                own = [at for at in self.step.backward_of(tensor.region) if first <= at <= last] or [last]
                size, first, last = min(tensor.bytes, tensor.valid_bytes), own[0], own[-1]
            known = found.get(tensor.storage, (size, first, last))
            found[tensor.storage] = max(size, known[0]), min(first, known[1]), max(last, known[2])
        return found

    def _pool_size(self, most: int) -> PoolSize:
        """The pool, if the measured step needs `most` pages."""
        config = self.rules.pool
        if config.device_bytes is not None:
            return PoolSize(config.device_bytes if self.rules.rules else 0)
        if self.step.skew is None:
            return PoolSize(ceil(config.headroom * most) * config.page_bytes)
        lives, rows = self.step.lives, self.step.rows
        paged = {
            storage: home
            for storage, home in self.homes.items()
            if home == "stash" or (home == "offload" and storage in rows.tensors)
        }
        changes = [0] * (self.step.count + 1)
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
        return self.step.skew.pool(
            live, rows, ceil(config.headroom * fixed), config.page_bytes, chances=len(peaks)
        )

    def _hooks(self, lanes: Lanes, replays: Sequence[_Replay], moves: Sequence[Move]) -> None:
        """The host's time of the keeper itself, beside that of its hooks."""
        cost = self.step.overhead
        if not self.rules.rules:
            return
        for region in self.recomputing.regions.values():
            for at in self.step.forward_of(region.within)[:1]:
                lanes.add(at, host=cost.record)
        for replay in replays:
            # A replay saves its tensors again.
            lanes.add(replay.first, host=cost.replay + len(replay.storages) * cost.pack)
        for move in moves:
            lanes.add(move.put_at - 1, host=cost.put)
            lanes.add(move.asked_at[0], host=cost.get)

    # --- recompute ---

    def _replays(self) -> list[_Replay]:
        owned: dict[str, list[int]] = {}
        for storage, home in self.homes.items():
            if home == "recompute" or storage in self.recomputing.discarded:
                owned.setdefault(self._owner(storage), []).append(storage)
        found: dict[str, _Replay] = {}
        for name, storages in owned.items():
            region = self.recomputing.regions[name]
            first = min(self.step.lives[storage].needed_at for storage in storages)
            forward, share = self._repeated(region, storages)
            lanes = (self.step.seconds, self.step.lanes.device, self.step.lanes.host)
            seconds = (share * sum(own[at] for at in forward) for own in lanes)
            found[name] = _Replay(region, forward, storages, first, *seconds)
        # A replay needs its inputs: those that are themselves recomputed come back with it.
        for replay in sorted(found.values(), key=lambda item: min(item.forward, default=0), reverse=True):
            for storage in replay.region.inputs:
                maker = self.recomputing.makers.get(storage)
                if maker is not None and self.homes.get(storage) == "recompute" and maker.name in found:
                    chained = found[maker.name]
                    chained.first = min(chained.first, replay.first)
        return list(found.values())

    def _owner(self, storage: int) -> str:
        """The region whose replay brings the storage back."""
        maker = self.recomputing.makers.get(storage)
        if maker is not None and self.homes[storage] == "recompute":
            return maker.name
        return self.recomputing.discarded[storage]

    def _repeated(self, region: Region, storages: Sequence[int]) -> tuple[Sequence[int], float]:
        """The forward segments that run again for these storages, and what part of their time."""
        forward = self.step.forward_of(region.within)
        if region.within != region.name:
            return forward, FUSED_SHARE
        if not any(storage in region.outputs for storage in storages):
            last = max(self.step.lives[storage].saved_at for storage in storages)
            forward = [at for at in forward if at <= last]
        return forward, 1.0

    def _come_back(self, replay: _Replay) -> None:
        lives = [self.step.lives[storage] for storage in replay.storages]
        for storage, life in zip(replay.storages, lives):
            if (
                self.homes[storage] == "recompute"
            ):  # else its home has it meanwhile, and a replay makes another
                self._add("recompute", life.saved_at, life.last_saved_at, life.bytes)
            self._add("recompute", replay.first, max(replay.first, life.freed_at), life.bytes)
        back = sum(life.bytes for life in lives)
        beside = self._beside(replay.first, lives)
        self.spikes.append((replay.first, beside, self._replay_peak(replay, lives), back))

    def _beside(self, at: int, lives: Sequence[Life]) -> int:
        """Bytes beside saved tensors when backward first asks for one of these, in segment `at`.

        Of those that it asks for in one segment, the one that was saved last comes first.
        """
        asked = [life for life in lives if life.needed_at == at and life.beside_bytes is not None]
        floor = max(self.step.floor[max(0, at - 1) : at + 1])
        return max(asked, key=lambda life: life.saved_at).beside_bytes or 0 if asked else floor

    def _replay_peak(self, replay: _Replay, lives: Sequence[Life]) -> int:
        """The most bytes that the replay takes: what memory grew by in the region's forward."""
        back = sum(life.bytes for life in lives)
        if not replay.forward or not self.step.knows_memory:
            return back
        segments, first = self.step.profile.segments, replay.forward[0]
        before = (segments[first - 1].end_bytes or 0) if first else 0
        return max(back, max(segments[at].peak_bytes or 0 for at in replay.forward) - before)

    # --- offload ---

    def _headroom(self, moves: Sequence[Move], plan: OffloadPlan, pool: int) -> dict[Event, int]:
        """How far the keeper's measured step is from its peak after each put; see `offload/headroom.py`.

        In that step what leaves is gone at once. Gradients are what `floor` grows by in backward.
        """
        step = self.step
        if not step.reads_allocator or not moves:
            return {}
        changes = list(self.changes["keep"])
        for home in ("stash", "recompute"):
            changes = [one + other for one, other in zip(changes, self.changes[home])]
        for move in moves:
            for storage in move.storages:
                life = step.lives.get(storage)
                if life is not None and self.homes[storage] == "offload":
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

    def _until_put(self, moves: Sequence[Move]) -> None:
        """Count what is saved until its group is put."""
        for move in moves:
            for storage in move.storages:
                if self.homes.get(storage) == "offload":
                    life = self.step.lives[storage]
                    self._add("offload", life.saved_at, move.put_at - 1, life.bytes)
            for saved_at, size in move.slices:
                self._add("offload", saved_at, move.put_at - 1, size)

    def _offload(self, moves: Sequence[Move], played: Played) -> int:
        """Count what offloaded groups take; returns the most bytes on the host."""
        by_key = {move.key: move for move in moves}
        self._until_put(moves)
        fetched: set[Key] = set()
        changes = self.changes["offload"]
        host = most_host = 0
        away: dict[Key, int] = {}
        for at, what, key in played.changes:
            move = by_key[key]
            freed = {s: self.step.lives[s].bytes for s in move.storages if self.homes.get(s) == "offload"}
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
        for _, what, key in played.changes:  # host memory is taken when a copy out begins
            if key in away and what in ("put", "dropped"):
                host += away[key] if what == "put" else -away[key]
                most_host = max(most_host, host)
        return most_host

    # --- all together ---

    def _result(
        self,
        replays: Sequence[_Replay],
        moves: Sequence[Move],
        plan: OffloadPlan,
        played: Played,
        seconds: Sequence[float],
        stash_seconds: float,
        pool: int,
        host: int,
    ) -> Prediction:
        step = self.step
        memory: dict[str, Sequence[int]] = {"base": [step.base_bytes] * step.count, "other": step.extra}
        for home in HOMES:
            memory[home] = list(accumulate(self.changes[home][: step.count]))
        memory["stash"] = [size + pool for size in memory["stash"]]
        total = [sum(sizes) for sizes in zip(*memory.values())]
        for at, beside, most, back in self.spikes:
            spike = total[at] - step.extra[at] + beside - back + most
            if spike > total[at]:
                memory["recompute"][at] += spike - total[at]  # type: ignore[index]
                total[at] = spike
        peak_at = max(range(step.count), key=total.__getitem__)
        waits = dict.fromkeys(range(step.count + 1), 0.0)
        for at, wait in played.waits:
            waits[at] += wait
        spent = [waits[at] + own for at, own in enumerate(seconds)]
        held = dict.fromkeys(HOMES, 0)
        for storage, home in self.homes.items():
            held[home] += step.lives[storage].bytes
        return Prediction(
            seconds=sum(seconds) + played.waited,
            recompute_seconds=sum(replay.seconds for replay in replays),
            stash_seconds=stash_seconds,
            wait_seconds=played.waited,
            waits=played.waits,
            out_seconds=played.out_seconds,
            back_seconds=played.back_seconds,
            moved_bytes=sum(move.bytes for move in moves if move.key not in plan.stays),
            host_bytes=host,
            peak_bytes=total[peak_at],
            peak_at=peak_at,
            starts=[0.0, *accumulate(spent)][: step.count],
            memory=memory,
            staying=frozenset(str(move.key[-2]) for move in moves if move.key in plan.stays)
            - {str(move.key[-2]) for move in moves if move.key not in plan.stays},
            held_bytes=held,
            pool=self.pool,
        )
