"""A step whose layers are recomputed, so that one fits that would not without a policy; and that one, predicted.

Each layer's forward keeps its inputs alone, and runs again in backward, as under `torch.utils.checkpoint`. Only
there its saved tensors are seen, and the times of its regions. So the measured step is, for layers 0 to n,

    F0 F1 … Fn  head   head's backward  Rn Bn … R1 B1 R0 B0

with R for what runs again, and the one without a policy is taken to be R0 R1 … Rn head, its backward, Bn … B0. In
both, memory in a segment is what saved tensors take and what else is there: workspace, gradients. The latter is
what was measured, less saved tensors and the inputs that layers hold for their replays.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from pagestash.profiling.levels import Levels
from pagestash.profiling.records import ALLOCATED, SavedTensor
from pagestash.profiling.timeline import Timeline
from pagestash.profiling.tracker import RegionTracker
from pagestash.saved.calls import set_calls, under_way
from pagestash.saved.names import named_modules
from pagestash.saved.region import frames, set_frames
from pagestash.torch_internals import storage_key, tree_flatten, tree_unflatten


def layers_of(model: nn.Module) -> list[nn.Module]:
    """What is recomputed."""
    return list(_layers(model).values())


def layer_names(model: nn.Module) -> list[str]:
    """Their names."""
    return list(_layers(model))


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules whose names end in a number, and that have parameters."""
    found: dict[str, nn.Module] = {}
    for name, module in named_modules(model).items():
        inside = any(name.startswith(f"{other}.") for other in found)
        if name.rpartition(".")[2].isdigit() and not inside and next(module.parameters(), None) is not None:
            found[name] = module
    return found


@dataclass(slots=True, eq=False)
class Replay:
    """One call of a layer: the segment of forward in which it ran, and those of its replay and its backward."""

    forward: int
    first: int = 0
    """Of its replay."""
    turn: int = 0
    """Of its backward."""
    end: int = 0
    """Backward is done with it before this one."""
    inputs: dict[int, int] = field(default_factory=dict)
    """Bytes of the storages that it holds for its replay."""
    result_bytes: int = 0
    """Of what the replay returns, which is held until its backward is over."""


class Recorder(Protocol):
    """Records what replays save."""

    def holds(self, storages: Iterable[int]) -> None:
        """A layer holds these storages, by their keys, until its backward is over."""

    def watching(self) -> AbstractContextManager[None]:
        """Around a replay."""

    def look_at_replay(self, results: Iterable[torch.Tensor]) -> None:
        """When it is over, with what it returned."""


@dataclass(slots=True, eq=False)
class RecomputedLayers:
    """Around forward and backward of one run: the layers of the model run again in backward."""

    model: nn.Module
    timeline: Timeline | None = None
    """Where replays begin and end; None: in a run that is not cut into segments."""
    tracker: RegionTracker | None = None
    recorder: Recorder | None = None
    """What records saved tensors, in a run that is recorded."""
    replays: list[Replay] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[list[Replay]]:
        """The replays of the run inside."""
        with ExitStack() as stack:
            for layer in layers_of(self.model):
                before = layer.__dict__.get("forward")
                layer.forward = partial(self._call, layer.forward)
                stack.callback(_restore, layer, before)
            if self.tracker is not None:
                stack.enter_context(self.tracker.hooked())
            yield self.replays

    def _call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        call = _LayerCall(self, forward, leaves, spec)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        anchor = torch.empty(
            0, requires_grad=True
        )  # so that a layer without such an input has a backward, too
        found = iter(_Again.apply(call, anchor, *tensors))
        results = [next(found) if is_tensor else leaf for is_tensor, leaf in call.results]
        return tree_unflatten(results, call.spec)


def _restore(layer: nn.Module, forward: Any) -> None:
    if forward is None:
        del layer.forward
    else:
        layer.forward = forward


class _LayerCall:
    """One call of a layer, and what its replay needs."""

    def __init__(
        self, run: RecomputedLayers, forward: Callable[..., Any], leaves: list[Any], spec: Any
    ) -> None:
        self.run, self.forward, self.leaves, self.given = run, forward, leaves, spec
        self.results: list[tuple[bool, Any]] = []
        self.spec: Any = None
        self.frames = frames()
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        self.replay = Replay(0 if run.timeline is None else run.timeline.now, inputs=sizes)
        run.replays.append(self.replay)
        if run.recorder is not None:
            run.recorder.holds(sizes)
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self.random = torch.get_rng_state(), [(one, torch.cuda.get_rng_state(one)) for one in devices]
        kind = next((tensor.device.type for tensor in tensors), "cpu")
        self.autocast = partial(
            torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        )

    def first(self) -> tuple[torch.Tensor, ...]:
        """Run without a graph, and without regions inside."""
        calls, outside = under_way(), frames()
        set_frames(())
        try:
            args, kwargs = tree_unflatten(self.leaves, self.given)
            leaves, self.spec = tree_flatten(self.forward(*args, **kwargs))
        finally:
            set_frames(outside)
            set_calls(calls)
        self.results = [(isinstance(each, torch.Tensor), each) for each in leaves]
        found = tuple(leaf for is_tensor, leaf in self.results if is_tensor)
        self.results = [(is_tensor, None if is_tensor else leaf) for is_tensor, leaf in self.results]
        return found

    def again(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run with a graph, and its backward; the gradients of the inputs."""
        timeline, replay = self.run.timeline, self.replay
        given = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in self.leaves
        ]
        args, kwargs = tree_unflatten(given, self.given)
        devices = [device for device, _ in self.random[1]]
        with torch.random.fork_rng(devices), torch.enable_grad(), self.autocast(), ExitStack() as around:
            torch.set_rng_state(self.random[0])
            for device, state in self.random[1]:
                torch.cuda.set_rng_state(state, device)
            outside, calls = frames(), under_way()
            around.callback(set_calls, calls)
            around.callback(set_frames, outside)
            set_frames(self.frames)
            if timeline is not None:
                replay.first = timeline.begin_replay()
            with ExitStack() as watched:
                if self.run.recorder is not None:
                    watched.enter_context(self.run.recorder.watching())
                results = tree_flatten(self.forward(*args, **kwargs))[0]
            del args, kwargs
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        del results
        replay.result_bytes = sum(
            {storage_key(each): each.untyped_storage().nbytes() for each in tensors}.values()
        )
        if self.run.recorder is not None:
            self.run.recorder.look_at_replay(tensors)
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors, gradients)
            if gradient is not None and tensor.requires_grad
        ]
        del tensors
        if timeline is not None:
            replay.turn = timeline.begin_backward_of([tensor for tensor, _ in pairs])
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        if timeline is not None:
            replay.end = timeline.end_backward_of()
        self.leaves, leaves = [], self.leaves
        return [
            own.grad if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None
            for own, leaf in zip(given, leaves)
            if isinstance(leaf, torch.Tensor)
        ]


class _Again(torch.autograd.Function):
    """A layer's call as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, call: _LayerCall, anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.call = call
        return call.first()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call, ctx.call = ctx.call, None
        return None, None, *call.again(gradients)


# --- the step without a policy ---


@dataclass(slots=True)
class WithoutReplays:
    """Which segments of a step with recomputed layers the one without has, and where."""

    replays: Sequence[Replay]
    order: list[int]
    turn: int
    at: list[int]
    """For each measured segment, its place."""

    @classmethod
    def of(cls, timeline: Timeline, replays: Sequence[Replay]) -> "WithoutReplays":
        count, turn = len(timeline.paths), timeline.turn
        instead = {replay.forward: replay for replay in replays}
        order: list[int] = []
        at = [0] * count
        for old in range(turn):
            own = instead.get(old)
            at[old] = len(order)
            order += [old] if own is None else range(own.first, own.turn)
        forward = len(order)
        again = {old for replay in replays for old in range(replay.first, replay.turn)}
        order += [old for old in range(turn, count) if old not in again]
        for new, old in enumerate(order):
            at[old] = new
        return cls(replays, order, forward, at)

    def segments(self, values: Sequence[Any]) -> list[Any]:
        """What was measured for each segment, in the order of the step without."""
        return [values[old] for old in self.order]

    def tensors(self, found: Sequence[SavedTensor]) -> list[SavedTensor]:
        """Saved tensors in the order of forward."""

        def moved(tensor: SavedTensor) -> SavedTensor:
            return replace(
                tensor,
                saved_at=self.at[tensor.saved_at],
                needed_at=self.at[tensor.needed_at],
                freed_at=self.at[tensor.freed_at],
                asked=(self.at[tensor.asked[0]], tensor.asked[1]),
                done_at=self.at[tensor.done_at],
            )

        return counted_first(sorted(map(moved, found), key=lambda tensor: tensor.saved_at))

    def memory(
        self, readings: Sequence[tuple[int, int]], found: Sequence[SavedTensor], keys: dict[int, int]
    ) -> list[tuple[int, int]]:
        """Bytes at the end of each segment and the most in it, for the step without.

        `readings` are those of the measured one, whose saved tensors were `found`; `keys` has the number of a
        storage by its key.
        """
        count = len(readings)
        saved = {tensor.storage: tensor for tensor in found if tensor.counted and tensor.kind in ALLOCATED}
        known = Levels(count)
        for tensor in saved.values():
            known.add(tensor.saved_at, tensor.freed_at, tensor.storage_bytes)
        for first, last, size in self._held(saved, found, keys):
            known.add(first, last, size)
        extra = [max(0, peak - own) for (_, peak), own in zip(readings, known.during())]
        floor = [max(0, end - own) for (end, _), own in zip(readings, known.after())]
        for replay in self.replays:  # where these segments are, no gradients are there yet
            more = floor[replay.first - 1] - (floor[replay.forward - 1] if replay.forward else 0)
            for at in range(replay.first, replay.turn):
                extra[at], floor[at] = max(0, extra[at] - more), max(0, floor[at] - more)
        without = Levels(count)
        for tensor in saved.values():
            without.add(self.at[tensor.saved_at], self.at[tensor.freed_at], tensor.storage_bytes)
        during, after = without.during(), without.after()
        return [
            (floor[old] + after[new], max(extra[old] + during[new], floor[old] + after[new]))
            for new, old in enumerate(self.order)
        ]

    def beside(self, found: Sequence[SavedTensor], keys: dict[int, int], count: int) -> list[SavedTensor]:
        """The tensors, without what layers held for their replays in what was read beside saved tensors."""
        saved = {tensor.storage: tensor for tensor in found if tensor.counted}
        held = Levels(count)
        for first, last, size in self._held(saved, found, keys):
            held.add(first, last, size)
        level = held.during()
        return [
            tensor
            if tensor.beside_bytes is None
            else replace(tensor, beside_bytes=max(0, tensor.beside_bytes - level[tensor.needed_at]))
            for tensor in found
        ]

    def _held(
        self, saved: dict[int, SavedTensor], found: Sequence[SavedTensor], keys: dict[int, int]
    ) -> Iterator[tuple[int, int, int]]:
        """What layers hold for their replays and is no saved tensor then: from when to when, and bytes."""
        for number, (first, last, size) in self._inputs(found, keys).items():
            tensor = saved.get(number)
            if tensor is None:
                yield first, last, size
            else:
                yield first, tensor.saved_at - 1, size
                yield tensor.freed_at + 1, last, size
        for replay in self.replays:
            yield replay.turn, replay.end, replay.result_bytes

    def _inputs(self, found: Sequence[SavedTensor], keys: dict[int, int]) -> dict[int, tuple[int, int, int]]:
        """Storages that layers hold for their replays, and that are neither weights nor the batch: from when to
        when, and bytes."""
        others = {tensor.storage for tensor in found if tensor.kind not in ALLOCATED}
        spans: dict[int, tuple[int, int, int]] = {}
        for replay in self.replays:
            for key, size in replay.inputs.items():
                number = keys.get(key, -1 - key)
                if number not in others:
                    first, last, _ = spans.get(number, (replay.forward, replay.end, size))
                    spans[number] = min(first, replay.forward), max(last, replay.end), size
        return spans


def counted_first(tensors: Sequence[SavedTensor]) -> list[SavedTensor]:
    """The tensors, where each storage counts with the first of them."""
    counted: dict[int, int] = {}
    for tensor in tensors:
        counted[tensor.storage] = max(counted.get(tensor.storage, 0), tensor.counted)
    found = []
    for tensor in tensors:
        found.append(replace(tensor, counted=counted.get(tensor.storage, 0)))
        counted[tensor.storage] = 0
    return found
