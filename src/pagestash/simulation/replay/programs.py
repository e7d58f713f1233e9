"""What a stage does for one microbatch, as pieces that run one after the other.

A *piece* takes a lane of the rank: compute, or communication (dispatch and combine of experts' rows). It may ask
for offloaded groups before it begins, and put groups away when it ends. Seconds and bytes that are in proportion to
rows are those of balanced routing; a replay multiplies them by what the routing gives (`Routing`).

A copy over the host link reads or writes device memory beside compute. Kernels are taken to be bound by memory:
they take longer by moved bytes / rate of the device's memory, each way.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from pagestash.simulation.costs.costs import Amount, LayerCosts, StepCosts

PieceKind = Literal["forward", "backward", "weight", "recompute", "stash", "dispatch", "combine", "gather"]
COMMUNICATION: tuple[PieceKind, ...] = ("dispatch", "combine", "gather")


class Routing(Protocol):
    """Rows that experts' ranks receive, as factors of the balanced number."""

    def hottest(self, layer: int, microbatch: int) -> float:
        """Of the rank that receives most: the others wait for it."""
        ...

    def held(self, layer: int, microbatch: int) -> float:
        """Of the rank whose memory is reported."""
        ...


class Balanced:
    """Every rank receives the same."""

    def hottest(self, layer: int, microbatch: int) -> float:
        return 1.0

    def held(self, layer: int, microbatch: int) -> float:
        return 1.0


class Piece(NamedTuple):
    """A part of an action that runs on one lane."""

    kind: PieceKind
    seconds: float
    row_seconds: float = 0.0
    """Beside `seconds`, in proportion to the rows of the hottest rank."""
    layer: int = -1
    gets: tuple[str, ...] = ()
    """Groups that must be back before it begins."""
    puts: tuple[str, ...] = ()
    """Groups that leave when it ends."""
    drops: tuple[str, ...] = ()
    """Groups that backward is done with when it ends."""
    takes: int = 0
    """Device bytes from its begin on, those of its groups included."""
    row_takes: int = 0
    frees: int = 0
    """Device bytes that are free when it ends, those of groups not included."""
    row_frees: int = 0
    host: float = 0.0
    """Seconds in which the host launches it."""
    waits: bool = False
    """Whether the host waits until all before it is done."""


class MovedGroup(NamedTuple):
    """Saved tensors that leave the device together."""

    moved_bytes: float
    """Copied each way."""
    device_bytes: int
    """On the device once it is back."""
    layer: int = -1
    by_rows: bool = False
    """Whether bytes are in proportion to rows."""
    window: int | None = None
    """Its rule's `prefetch_bytes`."""
    freed_bytes: int | None = None
    """Free when it has left, where that is not `device_bytes`: something else keeps the other storages."""
    kept_bytes: int = 0
    """What its rule's `fraction` leaves on the device."""
    headroom: int = 0
    """When it is put, how far memory is from its peak, as a keeper measures it; 0: not known."""


@dataclass(frozen=True, slots=True)
class StageProgram:
    """The pieces of each action of a stage, by the kinds of `schedules/plan.py`: `B` is both halves in one."""

    pieces: Mapping[str, Sequence[Piece]]
    groups: Mapping[str, MovedGroup] = field(default_factory=dict)


def programs_of(costs: StepCosts) -> list[StageProgram]:
    """The programs of all stages. Layers are numbered through the model."""
    first, found = 0, []
    pools = {stage.stage: rank.static.pool > 0 for rank in costs.ranks for stage in rank.stages}
    for stage in costs.stages:
        layers = [
            _Layer(first + at, layer, pools[stage.stage], costs.memory_rate, costs.waits_for_rows)
            for at, layer in enumerate(stage.layers)
        ]
        first += len(layers)
        whole = [piece for layer in reversed(layers) for piece in layer.backward()]
        # A first stage has no input gradient: the first half of its split backward is empty.
        split = stage.stage > 0
        half = [piece for layer in reversed(layers) for piece in layer.half()] if split else []
        weight = [piece for layer in reversed(layers) for piece in layer.weight()] if split else whole
        found.append(
            StageProgram(
                {
                    "F": [piece for layer in layers for piece in layer.forward()],
                    "B": whole,
                    "I": half,
                    "W": weight,
                },
                {name: group for layer in layers for name, group in layer.groups.items()},
            )
        )
    return found


class _Layer:
    """The pieces of one layer: attention and so on, dispatch, experts, combine; in backward the other way round."""

    def __init__(
        self, number: int, costs: LayerCosts, pooled: bool, memory_rate: float, waits: bool = False
    ) -> None:
        self._number, self._costs, self._waits = number, costs, waits
        kept, moved = costs.bytes_of("keep"), costs.moved_bytes
        self._beside = moved * (1 / memory_rate)
        self._kept = kept if pooled else kept + costs.bytes_of("stash")
        self.groups: dict[str, MovedGroup] = {}
        if moved.fixed:
            self.groups[f"{number}"] = MovedGroup(moved.fixed, int(moved.fixed))
        if moved.routed:
            self.groups[f"{number}.rows"] = MovedGroup(
                moved.routed, int(moved.routed), layer=number, by_rows=True
            )

    def _gather(self, beside: float) -> Iterator[Piece]:
        """Sharded weights are gathered beside the layer before, which takes about as long as this one."""
        late = self._costs.gather_seconds - beside
        if late > 0:
            yield self._piece("gather", Amount(late))

    def forward(self) -> Iterator[Piece]:
        costs = self._costs
        yield from self._gather(costs.forward.at())
        taken = self._kept + costs.moved_bytes
        rows = bool(costs.forward.routed or taken.routed)
        yield self._piece(
            "forward",
            Amount(costs.forward.fixed + self._beside.fixed),
            puts=tuple(name for name, group in self.groups.items() if not group.by_rows),
            takes=Amount(taken.fixed),
            host=costs.host.forward,
        )
        for piece in self._other("dispatch", costs.dispatch_seconds):
            yield piece._replace(waits=self._waits)
        if rows:
            yield self._piece(
                "forward",
                Amount(0.0, costs.forward.routed + self._beside.routed),
                puts=tuple(name for name, group in self.groups.items() if group.by_rows),
                takes=Amount(0.0, taken.routed),
                host=costs.host.forward_rows,
            )
        yield from self._other("stash", costs.stash_seconds)
        yield from self._other("combine", costs.combine_seconds)

    def backward(self) -> Iterator[Piece]:
        """Both halves in one."""
        yield from self._backward(
            "backward", self._costs.backward_input + self._costs.backward_weight, True, 1.0
        )

    def half(self) -> Iterator[Piece]:
        """Gradients of the input; what was saved stays for the other half."""
        yield from self._backward("backward", self._costs.backward_input, False, 0.5)

    def weight(self) -> Iterator[Piece]:
        """Gradients of the weights."""
        if self._costs.backward_weight != Amount() or self._kept != Amount() or self.groups:
            host = (self._costs.host.backward + self._costs.host.backward_rows) / 2
            piece = self._piece("weight", self._costs.backward_weight, frees=self._kept, host=host)
            yield piece._replace(drops=tuple(self.groups))

    def _backward(self, kind: PieceKind, seconds: Amount, frees: bool, part: float) -> Iterator[Piece]:
        """`part` of backward's launches are in it."""
        costs, asked = self._costs, tuple(self.groups)
        seconds = seconds + self._beside
        pieces = [
            *self._gather(seconds.at()),
            *self._other("stash", costs.stash_seconds),
            *(self._other("dispatch", costs.dispatch_seconds) if costs.dispatches_again else ()),
            *self._other("recompute", costs.recompute, costs.host.recompute),
            *(self._other("combine", costs.combine_seconds) if costs.dispatches_again else ()),
            *self._other("combine", costs.combine_seconds),
            self._piece(kind, Amount(0.0, seconds.routed), host=part * costs.host.backward_rows),
            *self._other("dispatch", costs.dispatch_seconds),
            self._piece(kind, Amount(seconds.fixed), host=part * costs.host.backward),
        ]
        pieces = [piece for piece in pieces if piece.seconds or piece.row_seconds] or pieces[-1:]
        most = costs.workspace
        rows = tuple(name for name, group in self.groups.items() if group.by_rows)
        pieces[0] = pieces[0]._replace(
            gets=rows, takes=int(most.fixed), row_takes=int(most.routed), layer=self._number
        )
        gone = most + self._kept if frees else most
        last = pieces[-1]  # that of attention and so on
        pieces[-1] = last._replace(
            gets=(*last.gets, *(name for name in asked if name not in rows)),
            frees=int(gone.fixed),
            row_frees=int(gone.routed),
            layer=self._number,
            drops=asked if frees else (),
        )
        yield from pieces

    def _other(self, kind: PieceKind, seconds: Amount, host: float = 0.0) -> Iterator[Piece]:
        if seconds != Amount():
            yield self._piece(kind, seconds, host=host)

    def _piece(
        self,
        kind: PieceKind,
        seconds: Amount,
        *,
        puts: tuple[str, ...] = (),
        takes: Amount = Amount(),  # noqa: B008 -- frozen
        frees: Amount = Amount(),  # noqa: B008
        host: float = 0.0,
    ) -> Piece:
        return Piece(
            kind,
            seconds.fixed,
            seconds.routed,
            self._number,
            puts=puts,
            takes=int(takes.fixed),
            row_takes=int(takes.routed),
            frees=int(frees.fixed),
            row_frees=int(frees.routed),
            host=host,
        )
