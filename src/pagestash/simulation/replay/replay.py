"""One step of a pipeline group, event by event.

Every rank runs its plan's actions in order. An action begins when its input has arrived: of a forward, the output
of the stage before; of a backward, the gradient of the stage after. Pieces of an action run one after the other,
each on its lane. Offloaded groups leave and come back by the keeper's own window (`saved/offload/window.py`), over
the links of `links.py`; compute waits when the window says so. Bubbles are what is left.

A rank here stands for all ranks of its expert-parallel group, which wait for each other at every dispatch: a piece
takes as long as on the hottest of them.

With `overlap`, a forward and a backward that follow each other run side by side: one computes while the other
communicates. Each lane still runs one piece at a time, in the order in which they ask.

The host launches pieces in the order in which they run, ahead of the device as far as it can: a piece begins when
its first kernel may be launched, and does not end before its last one is. Where the host waits for the number of
received rows, it is behind the device again.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pagestash.saved.offload.plan import Event, GroupBytes, Key, make_plan
from pagestash.schedules.plan import Action, Plan, immediate_backwards
from pagestash.simulation.cluster.cluster import HostLink
from pagestash.simulation.costs.costs import StepCosts
from pagestash.simulation.replay.clock import Clock, Flag, Process
from pagestash.simulation.replay.links import WAYS, NodeLinks
from pagestash.simulation.replay.moving import Moving, MovingAhead, Offloading
from pagestash.simulation.replay.played import RankReplay, Replay, Span
from pagestash.simulation.replay.programs import (
    COMMUNICATION,
    Balanced,
    MovedGroup,
    Piece,
    Routing,
    StageProgram,
    programs_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What ranks run on, as far as it is no part of their pieces."""

    link: HostLink
    nodes: Sequence[int] = ()
    """The node of each rank; empty: each has its own."""
    alike: int = 1
    """Devices of a node that do what a rank does."""
    send_seconds: Sequence[float] = ()
    """Of each stage's output to the next stage, and of the gradient back; empty: none takes time."""
    static_bytes: Sequence[int] = ()
    """What each rank's device holds beside activations."""
    margin: Literal["window", "last"] = "window"
    """How groups leave and return: by a keeper's window, or as Megatron-LM moves them."""
    beside_compute: float = 1.0
    """Seconds of dispatch and combine beside compute, over those alone."""
    taken_by_dispatch: float = 0.0
    """The share of compute that dispatch and combine take while they run beside it."""
    end_seconds: Sequence[float] = ()
    """After each rank's last action: reduction of gradients, optimizer."""


def replay(costs: StepCosts, routing: Routing | None = None) -> Replay:
    """One step of a pipeline group with these costs; rows are balanced unless `routing` says otherwise."""
    machine, stages = _machine(costs), programs_of(costs)
    return run_step(costs.plans, stages, machine, routing=routing, overlap=costs.overlaps_dispatch)


def _machine(costs: StepCosts) -> Machine:
    devices = max(1, costs.devices // len(costs.ranks))  # of one pipeline rank, side by side
    together = max(1, costs.host.devices // devices)  # pipeline ranks of a node
    sends = (stage.send_bytes for stage in costs.stages)
    return Machine(
        link=costs.host,
        nodes=[rank // together for rank in range(len(costs.ranks))],
        alike=costs.alike,
        send_seconds=[size / costs.send_rate + costs.send_latency if size else 0.0 for size in sends],
        static_bytes=[rank.static.allocated for rank in costs.ranks],
        margin=costs.margin,
        beside_compute=costs.beside_compute,
        taken_by_dispatch=costs.taken_by_dispatch,
        end_seconds=[rank.gradient_seconds + rank.optimizer_seconds for rank in costs.ranks],
    )


def run_step(
    plans: Sequence[Plan],
    stages: Sequence[StageProgram],
    machine: Machine,
    *,
    routing: Routing | None = None,
    overlap: bool = False,
) -> Replay:
    """Run one step. A plan whose ranks would wait for each other for ever is a `ValueError`."""
    clock = Clock()
    nodes = machine.nodes or range(len(plans))
    links = {
        node: NodeLinks(
            clock, machine.link, {rank: machine.alike for rank, own in enumerate(nodes) if own == node}
        )
        for node in dict.fromkeys(nodes)
    }
    shared = _Shared(clock, stages, machine, routing or Balanced(), _rank_of(plans))
    ranks = [
        _Rank(rank, plan, shared, links[nodes[rank]], overlap=overlap) for rank, plan in enumerate(plans)
    ]
    for rank in ranks:
        rank.start()
    clock.run()
    for rank in ranks:
        if rank.left:
            raise ValueError(
                f"the schedule cannot run: rank {rank.number} waits for ever before {rank.left[0]}"
            )
    found = [rank.result() for rank in ranks]
    return Replay(max((rank.finished for rank in ranks), default=0.0), found, clock.events)


def _rank_of(plans: Sequence[Plan]) -> dict[int, int]:
    return {stage: rank for rank, plan in enumerate(plans) for stage in plan.stages}


class _Shared:
    """What all ranks share: the clock, the programs, and what is on its way between ranks."""

    def __init__(
        self,
        clock: Clock,
        stages: Sequence[StageProgram],
        machine: Machine,
        routing: Routing,
        rank_of: Mapping[int, int],
    ) -> None:
        self.clock, self.stages, self.machine, self.routing = clock, stages, machine, routing
        self.rank_of = rank_of
        """The rank of each stage."""
        self.piped = len(stages) > 1
        self._arrived: dict[tuple[bool, int, int], Flag] = {}  # by way, stage that waits, and microbatch
        self._sent: dict[tuple[int, int], float] = {}

    def input_of(self, action: Action) -> Flag | None:
        """Set when the action's input has arrived; None if it needs nothing of another stage."""
        if action.kind == "W" or action.stage == (0 if action.kind == "F" else len(self.stages) - 1):
            return None
        key = action.kind == "F", action.stage, action.microbatch
        return self._arrived.setdefault(key, Flag())

    def send(self, action: Action, rank: int) -> Span | None:
        """Send the action's output to the stage that waits for it; the span of that, if it takes time."""
        forward = action.kind == "F"
        stage = action.stage + (1 if forward else -1)
        if action.kind == "W" or not 0 <= stage < len(self.stages):
            return None
        flag = self._arrived.setdefault((forward, stage, action.microbatch), Flag())
        way = rank, self.rank_of[stage]
        takes = self.machine.send_seconds
        seconds = takes[min(action.stage, stage)] if takes and way[0] != way[1] else 0.0
        if not seconds:
            self.clock.set(flag)
            return None
        begins = max(self.clock.now, self._sent.get(way, 0.0))
        self._sent[way] = begins + seconds
        self.clock.at(begins + seconds, lambda: self.clock.set(flag))
        return Span("send", action.stage, action.microbatch, begins, begins + seconds)


class _Rank:
    """One rank. Its process has a clock of its own, ahead of the common one while it touches nothing shared."""

    def __init__(
        self,
        number: int,
        plan: Plan,
        shared: _Shared,
        link: NodeLinks,
        *,
        overlap: bool,
    ) -> None:
        self.number, self.plan, self.shared, self.link = number, plan, shared, link
        self.clock, self.overlap = shared.clock, overlap
        self.left: deque[Action] = deque(plan.actions)
        self.finished = 0.0
        self._spans: list[Span] = []
        self._changes: list[tuple[float, int]] = []
        self._free = {"compute": 0.0, "communication": 0.0}
        self._host = 0.0  # when the host has launched what was run so far
        self._moving = self._offload()

    def start(self) -> None:
        self.clock.start(self._drive() if self.overlap else self._in_order())

    def result(self) -> RankReplay:
        for way in WAYS:
            self._spans += [Span(way, -1, -1, *span) for span in self.link.spans(self.number, way)]
        static = self.shared.machine.static_bytes
        now = static[self.number] if static else 0
        found = RankReplay(self.plan, sorted(self._spans, key=lambda span: span.start), [(0.0, now)], now)
        for time, change in sorted(self._changes, key=lambda item: item[0]):
            now += change
            found.peak_bytes = max(found.peak_bytes, now)
            if found.memory[-1][0] == time:
                found.memory[-1] = time, now
            else:
                found.memory.append((time, now))
        found.host_bytes = self._moving.host_peak
        return found

    def _in_order(self) -> Process:
        for action in self.plan.actions:
            yield from self._action(action)
        self._finish()

    def _drive(self) -> Process:
        """Begin each action when the one before has ended, or beside it if one is a forward and one a backward."""
        ended: list[Flag] = []
        before: Action | None = None
        for at, action in enumerate(self.plan.actions):
            beside = (
                before is not None
                and before[1:] != action[1:]
                and (action.kind == "F") != (before.kind == "F")
            )
            if at > beside:
                yield ended[at - 1 - beside]
            if beside and at > 1:
                yield ended[at - 2]
            ended.append(Flag())
            self.clock.start(self._beside(action, ended[-1]))
            before = action
        yield from ended[-2:]
        self._finish()

    def _beside(self, action: Action, ended: Flag) -> Process:
        yield from self._action(action)
        self.clock.set(ended)

    def _finish(self) -> None:
        ends = self.shared.machine.end_seconds
        seconds = ends[self.number] if ends else 0.0
        self.finished = self.clock.now + seconds
        if seconds:
            self._spans.append(Span("optimizer", -1, -1, self.clock.now, self.finished))

    def _action(self, action: Action) -> Process:
        """Wait for the input, run the pieces, send the output."""
        arrived = self.shared.input_of(action)
        if arrived is not None:
            yield arrived
        program = self.shared.stages[action.stage]
        now = self.clock.now
        for piece in program.pieces[action.kind]:
            if piece.gets:
                yield now
                for name in piece.gets:
                    yield from self._moving.get(self._key(action, name))
                now = self._waited(action, now)
            now = self._run(piece, action, now)
            if self.overlap:
                yield now  # the lanes are shared
            if piece.puts or piece.drops:
                yield now
                for name in piece.puts:
                    yield from self._moving.put(self._key(action, name))
                for name in piece.drops:
                    self._moving.drop(self._key(action, name))
                now = self._waited(action, now)
        yield now
        self.left.remove(action)
        span = self.shared.send(action, self.number)
        if span is not None:
            self._spans.append(span)

    def _waited(self, action: Action, since: float) -> float:
        """Copies may have been waited for."""
        if self.clock.now > since:
            self._spans.append(Span("wait", action.stage, action.microbatch, since, self.clock.now))
        return self.clock.now

    def _run(self, piece: Piece, action: Action, now: float) -> float:
        """Take a lane; the time when it is free again."""
        routing, microbatch = self.shared.routing, action.microbatch
        seconds = piece.seconds
        if piece.row_seconds:
            seconds += piece.row_seconds * routing.hottest(piece.layer, microbatch)
        lane = "communication" if piece.kind in COMMUNICATION else "compute"
        shares = self.overlap and piece.kind in ("dispatch", "combine")
        if shares:
            seconds *= self.shared.machine.beside_compute
        if piece.waits:
            self._host = max(self._host, now)
        begin = max(now, self._free[lane], self._host)
        self._host += piece.host
        end = self._free[lane] = max(begin + seconds, self._host)
        if shares:
            self._free["compute"] += self.shared.machine.taken_by_dispatch * seconds
        self._spans.append(Span(piece.kind, action.stage, microbatch, begin, end))
        rows = routing.held(piece.layer, microbatch) if piece.row_takes or piece.row_frees else 0.0
        takes, frees = piece.takes + int(rows * piece.row_takes), piece.frees + int(rows * piece.row_frees)
        if takes:
            self._changes.append((begin, takes))
        if frees:
            self._changes.append((end, -frees))
        return end

    # --- offload ---

    def _key(self, action: Action, name: str) -> Key:
        return (action.stage, action.microbatch, name, 0)

    def _offload(self) -> Offloading:
        """The keeper's plan for this rank's step."""
        events: list[Event] = []
        groups: dict[Key, MovedGroup] = {}
        for action in self.plan.actions:
            program = self.shared.stages[action.stage]
            for piece in program.pieces[action.kind]:
                events += [("get", self._key(action, name)) for name in piece.gets]
                for name in piece.puts:
                    key = self._key(action, name)
                    groups[key] = self._with_rows(program.groups[name], action.microbatch)
                    events.append(("put", key))
        # A keeper without a pipeline follows no schedule: nothing tells it that a backward comes at once.
        at_once = immediate_backwards(self.plan) if self.shared.piped else ()
        sizes = {key: _sizes(group) for key, group in groups.items()}
        plan = make_plan(list(dict.fromkeys(events)), sizes, at_once)
        plan.headroom = {("put", key): group.headroom for key, group in groups.items() if group.headroom}
        made = Moving if self.shared.machine.margin == "window" else MovingAhead
        return made(plan, groups, self.link.of_rank(self.number), self.clock, self._changes)

    def _with_rows(self, group: MovedGroup, microbatch: int) -> MovedGroup:
        """Its bytes with the rows of a microbatch."""
        if not group.by_rows:
            return group
        rows = self.shared.routing.held(group.layer, microbatch)
        return group._replace(
            moved_bytes=rows * group.moved_bytes, device_bytes=int(rows * group.device_bytes)
        )


def _sizes(group: MovedGroup) -> GroupBytes:
    """What the keeper's plan has to know of a group. One without bytes on the host would stay."""
    host = max(1, int(group.moved_bytes)) if group.moved_bytes else 0
    return GroupBytes(host, group.device_bytes, group.window)
