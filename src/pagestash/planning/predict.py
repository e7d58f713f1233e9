"""What a step would take under a policy: time, memory in every segment, waits, use of the link.

Nothing runs. The measured segments of a profile are played with the decisions that a keeper would make: homes by
`profiling/assign.py`, offload by the keeper's own window (`profiling/copies.py`). With, for segment s,

    alive(s)      bytes of saved tensors without a policy: saved in s or before, freed in s or later
    extra(s)      = peak(s) - alive(s): workspace, gradients, what else lives; 0 where the profile has no memory
    floor(s)      = end(s) - bytes of saved tensors alive after s: what of that is left at the segment's end

memory in s under a policy is `base + extra(s) + bytes of each home(s)`, and more while a region is replayed
(`replays.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from pagestash.planning.home_bytes import HomeBytes
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.offloaded import Offloaded
from pagestash.planning.prediction import Cost, Prediction, RuleTable
from pagestash.planning.replays import KnownReplays, Replay, Replays, Spike
from pagestash.planning.stashed import Stashed
from pagestash.policy import HOMES, HomeName, Policy
from pagestash.profiling.assign import Recomputing, assign_when_saved
from pagestash.profiling.copies import plan_of, play
from pagestash.profiling.groups import Move, moves_of
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.records import SavedTensor


def predict(
    profile: ProfiledStep,
    policy: Policy,
    *,
    base_bytes: int = 0,
    graphed: bool = False,
    waits: bool = False,
) -> Prediction:
    """The profiled step under `policy`; `base_bytes` is what the device holds before it: weights and so on.

    `graphed`: as a CUDA graph. `waits`: in a loop that waits for the device before each step.
    """
    policy.check(region.name for region in profile.regions)
    step = MeasuredStep(profile, base_bytes, graphed=graphed, loops=not waits)
    return Predictor(step).predict(RuleTable.of(policy, profile.regions))


class Predictor:
    """Predicts many policies for one measured step, each once."""

    def __init__(self, step: MeasuredStep) -> None:
        self.step = step
        self._known: dict[object, Prediction] = {}
        self._replays: KnownReplays = {}

    @property
    def count(self) -> int:
        """Predictions so far."""
        return len(self._known)

    @property
    def one(self) -> MeasuredStep:
        """The measured step, by whose regions policies are written."""
        return self.step

    def predict(self, rules: RuleTable) -> Prediction:
        key = frozenset(rules.rules.items()), rules.pool
        if key not in self._known:
            self._known[key] = self._playing(rules).play()
        return self._known[key]

    def cost(self, rules: RuleTable) -> Cost:
        """The policy's sums, which are faster to find."""
        return self._playing(rules).cost()

    def largest_kept(self, rules: RuleTable, at: int) -> SavedTensor | None:
        """The largest tensor that stays on the device under a policy and is there in segment `at`."""
        homes, lives = self._playing(rules).homes, self.step.lives
        found = [
            tensor
            for tensor in self.step.profile.tensors
            if homes.get(tensor.storage) == "keep"
            and lives[tensor.storage].saved_at <= at <= lives[tensor.storage].freed_at
        ]
        return max(found, key=lambda tensor: tensor.storage_bytes, default=None)

    def _playing(self, rules: RuleTable) -> "_Playing":
        return _Playing(self.step, rules, self._replays)


class _Playing:
    """One policy on one measured step."""

    def __init__(self, step: MeasuredStep, rules: RuleTable, replays: KnownReplays) -> None:
        self.step, self.rules = step, rules
        profile = step.profile
        # (A split backward replays a region twice, and what it asks for, too: there nothing is taken to be remade.)
        self.recomputing = Recomputing(rules, step.index, profile.regions, remakes=not step.halves)
        self.when_saved = assign_when_saved(rules, step.index, self.recomputing)
        self.homes = self._homes()
        self.replays = Replays(step, self.recomputing, self.homes, replays)

    def play(self) -> Prediction:
        step, held = self.step, HomeBytes(self.step.count)
        replays = self.replays.find()
        lanes = step.lanes.copy()
        for replay in replays:
            lanes.add(replay.first, device=replay.device_seconds, host=replay.host_seconds)
        pool = Stashed(step, self.rules, self.homes, self.when_saved).count(lanes, held)
        moves = self._moves(replays)
        for at, host in self._hooks(replays, moves):
            lanes.host[at] += host
        seconds = lanes.seconds()
        held_bytes = self._keep(held)
        spikes = [self.replays.come_back(replay, held) for replay in replays]
        offloaded = Offloaded(step, self.homes, moves)
        plan = plan_of(moves, step.at_once)
        plan.headroom = offloaded.headroom(held, pool.bytes)
        played = play(moves, plan, seconds, step.profile.link, sees_copies=step.sees_copies)
        waited = lanes.takes_longer(played.waited)
        slow, slow_waited = lanes.on_slow_host(), 0.0
        slow_seconds = slow.seconds()
        if moves:
            again = play(moves, plan, slow_seconds, step.slow_link, sees_copies=step.sees_copies)
            slow_waited = slow.takes_longer(again.waited)
        host_bytes = offloaded.count(played, held)
        memory, total = self._memory(held, spikes, pool.bytes)
        peak_bytes = max(total)
        moving = frozenset(str(move.key[-2]) for move in moves if move.key not in plan.stays)
        waits: dict[int, float] = {}
        for at, wait in played.waits:
            waits[at] = waits.get(at, 0.0) + wait
        spent = [*seconds, 0.0]
        for at, wait in waits.items():
            spent[at] += wait
        return Prediction(
            seconds=lanes.takes(seconds) + waited,
            slow_host_seconds=slow.takes(slow_seconds) + slow_waited,
            slower_host=lanes.slower,
            device_seconds=sum(lanes.device),
            launch_seconds=sum(lanes.host),
            recompute_seconds=sum(replay.seconds for replay in replays),
            wait_seconds=waited,
            slow_wait_seconds=slow_waited,
            waits=played.waits,
            out_seconds=played.out_seconds,
            back_seconds=played.back_seconds,
            moved_bytes=sum(move.bytes for move in moves if move.key not in plan.stays),
            host_bytes=host_bytes,
            peak_bytes=peak_bytes,
            peak_at=total.index(peak_bytes),
            starts=[0.0, *accumulate(spent)][: step.count],
            memory=memory,
            staying=frozenset(str(move.key[-2]) for move in moves) - moving,
            moving=moving,
            leaving=frozenset(
                storage for move in moves if move.key not in plan.stays for storage in move.leaving
            ),
            held_bytes=held_bytes,
            pool=pool,
        )

    def cost(self) -> Cost:
        """Sums alone, without a timeline."""
        held = dict.fromkeys(HOMES, 0)
        for storage, home in self.homes.items():
            life = self.step.lives[storage]
            held[home] += life.valid_bytes if home == "stash" else life.bytes
        moved = {
            tensor.storage: tensor.bytes if tensor.is_thin else tensor.valid_bytes
            for tensor, home in zip(self.step.profile.tensors, self.when_saved)
            if home == "offload"
        }
        if any(rule.home == "offload" and rule.fraction < 1.0 for rule in self.rules.rules.values()):
            step = self.step
            moves = moves_of(self.rules, step.profile.tensors, self.when_saved, step.timeline)
            moved = {number: move.bytes for number, move in enumerate(moves)}
            held["keep"] += sum(move.kept_bytes for move in moves)
        unsaved = sum(size for _, size, _, _ in self._unsaved_inputs())
        replays = self.replays.find()
        device = sum(replay.seconds for replay in replays) + 2 * held["stash"] / self.step.profile.link.copy
        launches = 0.0
        if self.step.ahead:
            launches = Stashed(self.step, self.rules, self.homes, self.when_saved).host_seconds
            launches += sum(replay.host_seconds for replay in replays)
            launches += sum(host for _, host in self._hooks(replays, self._moves(replays)))
            waits = self.step.exposed_launches * launches
        else:
            waits = len(replays) * self.step.exposed_overhead
        return Cost(
            kept_bytes=held["keep"] + unsaved + int(self.rules.pool.headroom * held["stash"]),
            moved_bytes=sum(moved.values()),
            seconds=device + waits,
            recomputed_bytes=max((replay.back_bytes for replay in replays), default=0),
            device_seconds=device,
            launch_seconds=launches,
        )

    def _moves(self, replays: Sequence[Replay]) -> list[Move]:
        """What is offloaded together."""
        step, inputs = self.step, self.replays.inputs(replays)
        return moves_of(
            self.rules, step.profile.tensors, self.when_saved, step.timeline, step.positions, inputs
        )

    def _homes(self) -> dict[int, HomeName]:
        """Where the bytes of each storage are in the end."""
        homes: dict[int, HomeName] = {}
        kept, when_saved = self.recomputing.kept_inputs, self.when_saved
        for at, storage, elsewhere in self.step.held:
            home = when_saved[at]
            if home == "keep" or elsewhere or storage in kept:
                homes[storage] = "keep"
            elif home == "recompute":
                homes[storage] = "keep" if homes.get(storage) == "keep" else "recompute"
            else:
                homes.setdefault(storage, home)
        heads = (storage for storage in self.step.rows.heads if homes.get(storage) == "stash")
        return homes | dict.fromkeys(heads, "keep")

    def _keep(self, held: HomeBytes) -> dict[HomeName, int]:
        """Count what stays; returns the saved bytes of each home."""
        found, lives, changes = dict.fromkeys(HOMES, 0), self.step.lives, held.changes["keep"]
        for storage, home in self.homes.items():
            life = lives[storage]
            size = life.bytes
            found[home] += size
            if home == "keep":
                changes[life.saved_at] += size
                changes[life.freed_at + 1] -= size
        for storage, size, first, last in self._unsaved_inputs():
            if storage not in self.homes:
                held.add("keep", first, last, size)
        return found

    def _unsaved_inputs(self) -> Iterable[tuple[int, int, int, int]]:
        """Inputs that are held for replays alone: storage, bytes, and from when to when."""
        seen: set[int] = set()
        for region in self.recomputing.regions.values():
            span = self.step.span(region.name)
            remade = {storage for storage, _, _ in self.recomputing.remade_for(region)}
            for storage, size in region.unsaved_inputs:
                if storage not in seen and storage not in remade and span is not None:
                    seen.add(storage)
                    yield storage, size, *span

    def _hooks(self, replays: Sequence[Replay], moves: Sequence[Move]) -> Iterator[tuple[int, float]]:
        """Segments, and the host's time of the keeper in them: for saved tensors, regions that it records, groups
        it moves."""
        cost = self.step.overhead
        if not any(rule.moves for rule in self.rules.rules.values()):
            return
        for tensor in self.step.profile.tensors if cost.pack or cost.unpack else ():
            yield tensor.saved_at, cost.pack
            yield tensor.needed_at, cost.unpack
        for region in self.recomputing.regions.values():
            for at in self.step.forward_of(region.within)[:1]:
                yield at, self.step.record_seconds(region.name)
        for replay in replays:
            # A replay saves its tensors again.
            own = self.step.replay_seconds(replay.region.name)
            yield replay.first, own + len(replay.storages) * cost.pack
        for move in moves:
            yield move.put_at - 1, cost.put
            yield move.asked_at[0], cost.get

    def _memory(
        self, held: HomeBytes, spikes: Sequence[Spike], pool: int
    ) -> tuple[dict[str, Sequence[int]], list[int]]:
        """Device bytes in each segment, by what holds them, and their sums."""
        step, levels = self.step, held.levels()
        if pool:
            levels["stash"] = [size + pool for size in levels["stash"]]
        memory: dict[str, Sequence[int]] = {"base": [step.base_bytes] * step.count, "other": step.extra}
        for home in HOMES:
            memory[home] = levels[home]
        total = list(map(sum, zip(*memory.values())))
        for at, beside, most, back in spikes:
            spike = total[at] - step.extra[at] + beside - back + most
            if spike > total[at]:
                levels["recompute"][at] += spike - total[at]
                total[at] = spike
        return memory, total
