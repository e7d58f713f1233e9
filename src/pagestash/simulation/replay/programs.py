"""What a stage does for one microbatch, as pieces that run one after the other.

A *piece* takes a lane of the rank: compute, or communication (dispatch and combine of experts' rows). It may ask
for offloaded groups before it begins, and put groups away when it ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pagestash.simulation.costs.costs import Amount, LayerCosts, StageCosts

PieceKind = Literal["forward", "backward", "weight", "recompute", "stash", "dispatch", "combine", "gather"]
COMMUNICATION: tuple[PieceKind, ...] = ("dispatch", "combine", "gather")
BACKWARD = 2
"""Launches of backward over those of forward."""


class Piece(NamedTuple):
    """A part of an action that runs on one lane."""

    kind: PieceKind
    seconds: float = 0.0
    gets: tuple[str, ...] = ()
    """Groups that must be back before it begins."""
    puts: tuple[str, ...] = ()
    """Groups that leave when it ends."""
    drops: tuple[str, ...] = ()
    """Groups that backward is done with when it ends."""
    takes: int = 0
    """Device bytes from its begin on, those of its groups included."""
    frees: int = 0
    """Device bytes that are free when it ends, those of groups not included."""
    host: float = 0.0
    """Seconds in which the host launches it."""
    waits: bool = False
    """Whether the host waits until all before it is done."""


@dataclass(frozen=True, slots=True)
class StageProgram:
    """The pieces of each action of a stage, by the kinds of `schedules/plan.py`: `B` is both halves in one."""

    pieces: Mapping[str, Sequence[Piece]]
    groups: Mapping[str, int] = field(default_factory=dict)
    """Bytes of saved tensors that leave the device together."""
    send_seconds: float = 0.0
    """Of its output to the next stage, and of the gradient back."""


def programs_of(stages: Sequence[StageCosts]) -> list[StageProgram]:
    """The programs of all stages. Layers are numbered through the model."""
    first, found = 0, []
    for stage in stages:
        layers = [_Layer(first + at, layer) for at, layer in enumerate(stage.layers)]
        first += len(layers)
        whole = [piece for layer in reversed(layers) for piece in layer.backward()]
        # A first stage has no input gradient: the first half of its split backward is empty.
        split = stage.stage > 0
        half = [piece for layer in reversed(layers) for piece in layer.half()] if split else []
        weight = [piece for layer in reversed(layers) for piece in layer.weight()] if split else whole
        pieces = {"F": [piece for layer in layers for piece in layer.forward()], "B": whole}
        groups = {name: group for layer in layers for name, group in layer.groups.items()}
        found.append(StageProgram(pieces | {"I": half, "W": weight}, groups, stage.send_seconds))
    return found


class _Layer:
    """The pieces of one layer: attention and so on, dispatch, experts, combine; in backward the other way round."""

    def __init__(self, number: int, costs: LayerCosts) -> None:
        self._costs = costs
        self._kept, moved = costs.bytes_of("keep"), costs.bytes_of("offload")
        sizes = {f"{number}": int(moved.fixed), f"{number}.rows": int(moved.routed)}
        self.groups = {name: size for name, size in sizes.items() if size}
        self._own, self._rows = (tuple(name for name in (each,) if name in self.groups) for each in sizes)

    def forward(self) -> Iterator[Piece]:
        costs = self._costs
        yield from self._gather(costs.forward.total)
        seconds, taken = costs.forward + costs.offload_seconds, self._kept + costs.bytes_of("offload")
        yield Piece(
            "forward",
            seconds.fixed,
            puts=self._own,
            takes=int(taken.fixed),
            host=costs.launch_seconds.fixed,
        )
        for piece in self._other("dispatch", costs.dispatch_seconds):
            yield piece._replace(waits=costs.waits_for_rows)
        if costs.forward.routed or taken.routed:
            yield Piece(
                "forward",
                seconds.routed,
                puts=self._rows,
                takes=int(taken.routed),
                host=costs.launch_seconds.routed,
            )
        yield from self._other("stash", costs.stash_seconds)
        yield from self._other("combine", costs.dispatch_seconds)

    def backward(self) -> Iterator[Piece]:
        """Both halves in one."""
        both = self._costs.backward_input + self._costs.backward_weight
        yield from self._backward(both, self._free, (*self.groups,), 1.0)

    def half(self) -> Iterator[Piece]:
        """Gradients of the input; what was saved stays for the other half."""
        yield from self._backward(self._costs.backward_input, 0, (), 0.5)

    def weight(self) -> Iterator[Piece]:
        """Gradients of the weights."""
        costs = self._costs
        if costs.backward_weight or self._kept or self.groups:
            host, drops = BACKWARD * costs.launch_seconds.total / 2, (*self.groups,)
            yield Piece("weight", costs.backward_weight.total, frees=self._free, drops=drops, host=host)

    @property
    def _free(self) -> int:
        return int(self._kept.fixed) + int(self._kept.routed)

    def _backward(self, seconds: Amount, frees: int, drops: tuple[str, ...], part: float) -> Iterator[Piece]:
        """`part` of backward's launches are in it."""
        costs = self._costs
        seconds = seconds + costs.offload_seconds
        host = costs.launch_seconds * (BACKWARD * part)
        again = costs.dispatch_seconds if costs.dispatches_again else 0.0
        pieces = [
            *self._gather(seconds.total),
            *self._other("stash", costs.stash_seconds),
            *self._other("dispatch", again),
            *self._other("recompute", costs.recompute, costs.relaunch_seconds),
            *self._other("combine", again),
            *self._other("combine", costs.dispatch_seconds),
            Piece("backward", seconds.routed, host=host.routed),
            *self._other("dispatch", costs.dispatch_seconds),
            Piece("backward", seconds.fixed, host=host.fixed),
        ]
        pieces = [piece for piece in pieces if piece.seconds] or pieces[-1:]
        pieces[0] = pieces[0]._replace(gets=self._rows, takes=costs.workspace)
        last = pieces[-1]  # that of attention and so on
        pieces[-1] = last._replace(gets=(*last.gets, *self._own), frees=costs.workspace + frees, drops=drops)
        yield from pieces

    def _gather(self, beside: float) -> Iterator[Piece]:
        """Sharded weights are gathered beside the layer before, which takes about as long as this one."""
        yield from self._other("gather", max(0.0, self._costs.gather_seconds - beside))

    def _other(self, kind: PieceKind, seconds: float, host: float = 0.0) -> Iterator[Piece]:
        if seconds:
            yield Piece(kind, seconds, host=host)
