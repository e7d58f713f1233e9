"""One step of a pipeline group, event by event.

Every rank runs its plan's actions in order. An action begins when its input has arrived: of a forward, the output
of the stage before; of a backward, the gradient of the stage after. Pieces of an action run one after the other,
each on its lane. Offloaded groups leave and come back by the keeper's own window (`saved/offload/window.py`);
compute waits when the window says so. Bubbles are what is left.

A rank here stands for all ranks of its expert-parallel group, which wait for each other at every dispatch.

With overlap, a forward and a backward that follow each other run side by side: one computes while the other
communicates. Each lane still runs one piece at a time, in the order in which they ask.

The host launches pieces in the order in which they run, ahead of the device as far as it can: a piece begins when
its first kernel may be launched, and does not end before its last one is. Where the host waits for the number of
received rows, it is behind the device again.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from pagestash.saved.offload.plan import Event, GroupBytes, Key, make_plan
from pagestash.schedules.plan import Action, Plan, immediate_backwards
from pagestash.simulation.costs.costs import Machine, RankCosts, StepCosts
from pagestash.simulation.replay.clock import Clock, Flag, Process
from pagestash.simulation.replay.offload import Copies, Moving, MovingAhead
from pagestash.simulation.replay.played import RankReplay, Replay, Span
from pagestash.simulation.replay.programs import COMMUNICATION, Piece, StageProgram, programs_of


def replay(costs: StepCosts) -> Replay:
    """One step of a pipeline group with these costs."""
    return run_step(costs.ranks, programs_of(costs.stages), costs.machine)


def run_step(ranks: Sequence[RankCosts], stages: Sequence[StageProgram], machine: Machine) -> Replay:
    """Run one step. A plan whose ranks would wait for each other for ever is a `ValueError`."""
    clock = Clock()
    between = _Between(clock, stages, [rank.plan for rank in ranks])
    running = [_Rank(rank, stages, machine, between) for rank in ranks]
    for rank in running:
        clock.start(rank.run())
    clock.run()
    for number, rank in enumerate(running):
        if rank.left:
            raise ValueError(f"the schedule cannot run: rank {number} waits for ever before {rank.left[0]}")
    found = [rank.result() for rank in running]
    return Replay(max((rank.finished for rank in running), default=0.0), found, clock.events)


class _Between:
    """What is on its way between ranks."""

    def __init__(self, clock: Clock, stages: Sequence[StageProgram], plans: Sequence[Plan]) -> None:
        self.clock, self._stages = clock, stages
        self._rank_of = {stage: rank for rank, plan in enumerate(plans) for stage in plan.stages}
        self._arrived: dict[tuple[bool, int, int], Flag] = {}  # by way, stage that waits, and microbatch
        self._sent: dict[tuple[int, int], float] = {}

    def input_of(self, action: Action) -> Flag | None:
        """Set when the action's input has arrived; None if it needs nothing of another stage."""
        if action.kind == "W" or action.stage == (0 if action.kind == "F" else len(self._stages) - 1):
            return None
        key = action.kind == "F", action.stage, action.microbatch
        return self._arrived.setdefault(key, Flag())

    def send(self, action: Action) -> Iterable[Span]:
        """Send the action's output to the stage that waits for it; the span of that, if it takes time."""
        forward = action.kind == "F"
        stage = action.stage + (1 if forward else -1)
        if action.kind == "W" or not 0 <= stage < len(self._stages):
            return
        flag = self._arrived.setdefault((forward, stage, action.microbatch), Flag())
        way = self._rank_of[action.stage], self._rank_of[stage]
        seconds = self._stages[min(action.stage, stage)].send_seconds if way[0] != way[1] else 0.0
        if not seconds:
            self.clock.set(flag)
            return
        begins = max(self.clock.now, self._sent.get(way, 0.0))
        self._sent[way] = begins + seconds
        self.clock.at(begins + seconds, lambda: self.clock.set(flag))
        yield Span("send", action.stage, action.microbatch, begins, begins + seconds)


class _Rank:
    """One rank. Its process has a clock of its own, ahead of the common one while it touches nothing shared."""

    def __init__(
        self,
        costs: RankCosts,
        stages: Sequence[StageProgram],
        machine: Machine,
        between: _Between,
    ) -> None:
        self.costs, self.stages, self.machine = costs, stages, machine
        self.clock, self.between = between.clock, between
        self.left: deque[Action] = deque(costs.plan.actions)
        self.finished = 0.0
        self._spans: list[Span] = []
        self._changes: list[tuple[float, int]] = []
        self._free = {"compute": 0.0, "communication": 0.0}
        self._host = 0.0  # when the host has launched what was run so far
        self._copies = Copies(self.clock, machine.link)
        self._moving = self._offload()

    def run(self) -> Process:
        """All actions in order; with overlap, a forward and a backward that are neighbours begin together."""
        ended: list[Flag] = []
        before: Action | None = None
        for action in self.costs.plan.actions:
            if not self.machine.overlaps_dispatch:
                yield from self._action(action)
                continue
            beside = (
                before is not None
                and before[1:] != action[1:]
                and (action.kind == "F") != (before.kind == "F")
            )
            yield from ended[-2:-1] if beside else ended[-2:]
            ended.append(Flag())
            self.clock.start(self._beside(action, ended[-1]))
            before = action
        yield from ended[-2:]
        self.finished = self.clock.now + self.costs.end_seconds
        if self.costs.end_seconds:
            self._spans.append(Span("optimizer", -1, -1, self.clock.now, self.finished))

    def _beside(self, action: Action, ended: Flag) -> Process:
        yield from self._action(action)
        self.clock.set(ended)

    def result(self) -> RankReplay:
        spans = sorted((*self._spans, *self._copies.spans), key=lambda span: span.start)
        now = peak = self.costs.peak.static
        memory = [(0.0, now)]
        for time, change in sorted(self._changes, key=lambda item: item[0]):
            now += change
            peak = max(peak, now)
            if memory[-1][0] == time:
                memory.pop()
            memory.append((time, now))
        return RankReplay(self.costs.plan, spans, memory, peak, self._moving.host_peak)

    def _action(self, action: Action) -> Process:
        """Wait for the input, run the pieces, send the output."""
        arrived = self.between.input_of(action)
        if arrived is not None:
            yield arrived
        now = self.clock.now
        for piece in self.stages[action.stage].pieces[action.kind]:
            if piece.gets:
                yield now
                for name in piece.gets:
                    yield from self._moving.get(_key(action, name))
                now = self._waited(action, now)
            now = self._run(piece, action, now)
            if self.machine.overlaps_dispatch:
                yield now  # the lanes are shared
            if piece.puts or piece.drops:
                yield now
                for name in piece.puts:
                    yield from self._moving.put(_key(action, name))
                for name in piece.drops:
                    self._moving.drop(_key(action, name))
                now = self._waited(action, now)
        yield now
        self.left.remove(action)
        self._spans += self.between.send(action)

    def _waited(self, action: Action, since: float) -> float:
        """Copies may have been waited for."""
        if self.clock.now > since:
            self._spans.append(Span("wait", action.stage, action.microbatch, since, self.clock.now))
        return self.clock.now

    def _run(self, piece: Piece, action: Action, now: float) -> float:
        """Take a lane; the time when it is free again."""
        seconds = piece.seconds
        lane = "communication" if piece.kind in COMMUNICATION else "compute"
        shares = self.machine.overlaps_dispatch and piece.kind in ("dispatch", "combine")
        if shares:
            seconds *= self.machine.beside_compute
        if piece.waits:
            self._host = max(self._host, now)
        begin = max(now, self._free[lane], self._host)
        self._host += piece.host
        end = self._free[lane] = max(begin + seconds, self._host)
        if shares:
            self._free["compute"] += self.machine.taken_by_dispatch * seconds
        self._spans.append(Span(piece.kind, action.stage, action.microbatch, begin, end))
        if piece.takes:
            self._changes.append((begin, piece.takes))
        if piece.frees:
            self._changes.append((end, -piece.frees))
        return end

    def _offload(self) -> Moving | MovingAhead:
        """The plan of this rank's step, as its keeper makes it."""
        events: list[Event] = []
        groups: dict[Key, GroupBytes] = {}
        for action in self.costs.plan.actions:
            program = self.stages[action.stage]
            for piece in program.pieces[action.kind]:
                events += [("get", _key(action, name)) for name in piece.gets]
                for name in piece.puts:
                    key, size = _key(action, name), program.groups[name]
                    groups[key] = GroupBytes(host_bytes=size, device_bytes=size)
                    events.append(("put", key))
        # A keeper without a pipeline follows no schedule: nothing tells it that a backward comes at once.
        at_once = immediate_backwards(self.costs.plan) if len(self.stages) > 1 else ()
        plan = make_plan(list(dict.fromkeys(events)), groups, at_once)
        made = Moving if self.machine.margin == "window" else MovingAhead
        return made(plan, self._copies, self.clock, self._changes)


def _key(action: Action, name: str) -> Key:
    return (action.stage, action.microbatch, name, 0)
