"""`profile`: run a step several times and report what it saves and how long its regions take."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from pagestash.policy import Policy
from pagestash.profiling.layers import RecomputedLayers, Replay, WithoutReplays, layers_of
from pagestash.profiling.link import Link, find_link
from pagestash.profiling.memory import MemoryMeter
from pagestash.profiling.overhead import in_model, measure_overhead
from pagestash.profiling.progress import Progress, Tell, telling
from pagestash.profiling.recorder import TensorRecorder
from pagestash.profiling.records import Gradients, Segment
from pagestash.profiling.regions import make_regions
from pagestash.profiling.result import Profile
from pagestash.profiling.steps import RepeatedStep
from pagestash.profiling.timeline import Clock, EventClock, HostClock, NoClock, StepClock, Timeline
from pagestash.profiling.tracker import RegionTracker
from pagestash.saved.compiled import is_compiled
from pagestash.saved.names import named_modules
from pagestash.saved.region import frames
from pagestash.torch_internals import LOCAL_PART

LEAD, LEAST_LEAD = 1.5, 20e-6
"""Head start of the host in an observed segment: so many times what it takes to launch it, and in seconds."""

STEPS = 4
"""Steps that are timed as a whole in each repetition, one by one, on a GPU."""

Loss = Callable[[Any], torch.Tensor]
Way = Literal["whole", "recompute"]
"""How a step is measured."""


class Arguments(NamedTuple):
    """A batch of which a part is positional and a part has names."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def profile(
    model: nn.Module,
    batch: torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any],
    *,
    loss: Loss | None = None,
    policy: Policy | None = None,
    link: float | Link | None = None,
    autocast: torch.dtype | None = None,
    repeats: int = 3,
    gradients: Gradients = "held",
    progress: Progress = None,
    measure: Way = "whole",
) -> Profile:
    """Every tensor that one step of `model` saves for backward, by region, and what each home would save and cost.

        found = ps.profile(model, (tokens, labels))
        print(found.total_bytes)
        rich.print(found.table())

    `batch` is a tensor, a tuple of arguments or a dict of keyword arguments. `loss` turns the model's output
    into a scalar. By default it is the output's `.loss`, a scalar output itself, the sum of a tuple's leading
    scalars, or the sum of a tensor. With a `policy` each tensor also has the home that the policy gives it.
    `link` is in bytes per second; by default it is measured on a GPU.

    `gradients="held"`: the step finds gradients in place and adds to them, as every microbatch but the first does.
    `"fresh"`: it finds none, as after `zero_grad()`.

    `measure="recompute"`: for a step that finds no memory. While it is measured, its layers keep their inputs
    alone, and run again in backward, where their saved tensors are seen (`profiling/layers.py`). The profile is of
    the step that keeps all.

    `progress=True` shows a bar where stderr is a terminal; a function is told what runs, its number, and the total.

    The step runs once to warm up, once to record tensors, and `repeats` times each to time the whole (on a GPU four
    times as often) and each region. On a GPU it then runs in a loop in which the host waits for no step, for a
    second and another, of which the mean counts: under lasting load a GPU is slower than after a rest. Each
    repetition begins with the same random state. Gradients and buffers are restored afterwards.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: expected at least 1")
    step = repeated_step(model, batch, loss=loss, autocast=autocast, gradients=gradients)
    if policy is not None:
        policy.refuse_bits("a profile")
    if measure not in get_args(Way):
        raise ValueError(f"measure={measure!r}: expected 'whole' or 'recompute'")
    layers = len(layers_of(model)) if measure == "recompute" else 0
    if measure == "recompute" and not layers:
        raise ValueError(
            "measure='recompute': the model has no layers to recompute, modules whose names end in a number"
        )
    with step.gradients(), telling(progress) as tell:
        return _measure(step, policy, link, repeats, gradients, tell, layers)


def repeated_step(
    model: nn.Module,
    batch: torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any],
    *,
    loss: Loss | None = None,
    autocast: torch.dtype | None = None,
    gradients: Gradients = "held",
) -> RepeatedStep:
    """The step that `profile` runs with these arguments."""
    args, kwargs = _arguments(batch)
    _check(model, args, kwargs)
    if gradients not in get_args(Gradients):
        raise ValueError(f"gradients={gradients!r}: expected 'held' or 'fresh'")
    device = _device_of(model, args, kwargs)
    return RepeatedStep(model, args, kwargs, device, loss or default_loss, gradients == "held", autocast)


def _measure(
    step: RepeatedStep,
    policy: Policy | None,
    link: float | Link | None,
    repeats: int,
    gradients: Gradients,
    progress: Tell,
    layers: int,
) -> Profile:
    """`layers`: how many of them run again in backward; 0: the step keeps all."""
    model, device = step.model, step.device

    def tell(what: str, number: int) -> None:
        progress(what, number, 2 * repeats + 3)

    runs = _Runs(step, layers > 0)
    tell("warming up", 0)
    with runs.running():
        step.run(Timeline(NoClock()))

    tell("recording what is saved", 1)
    # On a CPU operations are counted one by one, which a compiled model does not have.
    counts = device.type != "cpu" or not any(map(is_compiled, model.modules()))
    meter = MemoryMeter(device) if counts else None
    order = Timeline(meter or NoClock())
    recorder = TensorRecorder(model, (step.args, step.kwargs), order, device, meter)
    with meter or nullcontext(), runs.running(recorder.tracker, recorder) as replays:
        step.run(order, recorder.forward(), recorder.look_around)
    tensors = recorder.tensors()
    if policy is not None:
        policy.check([*named_modules(model), *(t.region for t in tensors)])
    times = runs.times(order, repeats, tell)
    tell("measuring the link and the keeper", 2 * repeats + 2)
    paths, turn, waiting = order.paths, order.turn, recorder.waiting.by_segment(len(order.paths))
    memory: Sequence[tuple[int | None, int | None]] = (
        [(None, None)] * len(paths) if meter is None else meter.readings
    )
    if layers:
        without = WithoutReplays.of(order, replays)
        numbers = recorder.numbers()
        if meter is not None:
            memory = without.memory(meter.readings, tensors, numbers)
        tensors = without.tensors(without.beside(tensors, numbers, len(paths)))
        paths, waiting, turn = without.segments(paths), without.segments(waiting), without.turn
        times = times.of(without.order)
    segments = [
        Segment(path, "forward" if index < turn else "backward", own, *reading, host, waits)
        for index, (path, own, reading, host, waits) in enumerate(
            zip(paths, times.device, memory, times.host, waiting)
        )
    ]
    speed = find_link(device, link)
    regions = make_regions(tensors, segments, recorder, speed)
    overhead = None
    if device.type == "cuda":
        overhead = measure_overhead(device)
        if not layers:  # else the model's forward would not find the memory for that
            overhead = in_model(overhead, step, regions, len(tensors))
    tell("done", 2 * repeats + 3)
    return Profile(
        device=str(device),
        link=speed,
        tensors=tensors,
        regions=regions,
        segments=segments,
        plain_seconds=times.alone,
        loop_seconds=times.loop,
        host_waits=times.waits,
        allocated_bytes=None if layers else recorder.allocated_bytes,
        policy=policy,
        model_bytes=_bytes((*model.parameters(), *model.buffers()), device),
        gradient_bytes=_bytes((p for p in model.parameters() if p.requires_grad), device),
        parameter_bytes=_parameter_bytes(model, device),
        gradients=gradients,
        other_bytes=recorder.other_bytes,
        overhead=overhead,
        recomputed_layers=layers,
    )


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of each segment on the device and on the host, and of the unobserved step, alone and in a loop."""

    device: Sequence[float]
    host: Sequence[float | None]
    alone: float
    loop: float | None
    waits: bool

    def of(self, order: Sequence[int]) -> "_Times":
        """Of a step that has these segments alone."""
        device, host = [self.device[at] for at in order], [self.host[at] for at in order]
        part = sum(device) / (sum(self.device) or 1.0)
        loop = None if self.loop is None else part * self.loop
        return _Times(device, host, part * self.alone, loop, self.waits)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of a step, whose layers may be recomputed."""

    step: RepeatedStep
    recompute: bool

    def running(
        self, tracker: RegionTracker | None = None, recorder: TensorRecorder | None = None
    ) -> AbstractContextManager[list[Replay]]:
        """Around a run: the replays of its layers."""
        if not self.recompute:
            return nullcontext([])
        timeline = None if tracker is None else tracker.timeline
        return RecomputedLayers(self.step.model, timeline, tracker, recorder).running()

    def times(self, order: Timeline, repeats: int, tell: Callable[[str, int], None]) -> _Times:
        """Time the step and its segments; `order` has those of a run before."""
        cuda = self.step.device.type == "cuda"
        plain, launches, times, hosts = [], [], [], []
        for number in range(repeats):
            tell("timing", 2 + 2 * number)
            whole, launched = [], []
            for _ in range(STEPS if cuda else 1):
                clock = StepClock() if cuda else HostClock()
                with self.running():
                    whole.append(sum(self.step.run(Timeline(clock))))
                launched.append(clock.launched if isinstance(clock, StepClock) else [])
            plain.append(statistics.median(whole))
            launches.append([statistics.median(own) for own in zip(*launched)])
            tell("timing by region", 3 + 2 * number)
            if cuda:
                # Observing slows the host down, and the device must not wait for it.
                hosts.append(self._watched(order, HostClock()))
                leads = [LEAD * own + LEAST_LEAD for own in hosts[-1]]
                times.append(self._watched(order, EventClock(leads)))
            else:
                times.append(self._watched(order, HostClock()))
        # A slow moment of the machine is no property of the step. In a loop it is hidden.
        alone, loop, waits = min(plain), None, False
        if cuda:
            with self.running():
                loop, waits = self.step.time_loop(nullcontext, alone), self.step.waits_within()
        seconds = [statistics.median(own) for own in zip(*times)]
        host = _unobserved(hosts, launches, order.turn) if hosts else [None] * len(seconds)
        return _Times(seconds, host, alone, loop, waits)

    def _watched(self, order: Timeline, clock: Clock) -> list[float]:
        """The seconds of each segment."""
        timed = Timeline(clock)
        tracker = RegionTracker(self.step.model, timed)
        with self.running(tracker):
            seconds = self.step.run(timed, tracker.forward())
        if timed.paths != order.paths or timed.turn != order.turn:
            raise RuntimeError(
                "the model took another path when the same batch ran again; ps.profile() needs a repeatable step"
            )
        return seconds


def _unobserved(hosts: list[list[float]], launches: list[list[float]], turn: int) -> list[float]:
    """The host's seconds of each segment, scaled so that forward and backward take what they take unobserved.

    `launches` has both of each repetition; the fastest counts.
    """
    seconds = [statistics.median(own) for own in zip(*hosts)]
    found = []
    for own, whole in zip((seconds[:turn], seconds[turn:]), zip(*launches)):
        scale = min(whole) / sum(own) if sum(own) else 1.0
        found += [min(1.0, scale) * one for one in own]
    return found


def default_loss(output: Any) -> torch.Tensor:
    """The loss in a model's output."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        return output["loss"]
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        return output.loss
    values = list(output.values()) if isinstance(output, Mapping) else output
    if isinstance(values, torch.Tensor):
        return values if values.ndim == 0 else values.sum()
    if isinstance(values, tuple | list) and values and isinstance(values[0], torch.Tensor):
        if values[0].ndim:
            return values[0].sum()
        total = values[0]
        for value in values[1:]:
            if not isinstance(value, torch.Tensor) or value.ndim:
                break
            total = total + value
        return total
    raise ValueError(f"the model returned {type(output).__name__}: pass loss=, which turns it into a scalar")


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Arguments):
        return batch
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise ValueError(
        f"batch is a {type(batch).__name__}: expected a tensor, a tuple of arguments or a dict of keyword arguments"
    )


def _check(model: Any, args: Any, kwargs: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: expected an nn.Module")
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if not (args or kwargs) or (tensors and not any(tensor.numel() for tensor in tensors)):
        raise ValueError("batch is empty: expected at least one tensor with elements")
    if frames():
        raise RuntimeError(
            "ps.profile() and ps.verify() inside a keeper's step would see what the keeper does; call them outside"
        )
    if not torch.is_grad_enabled():
        raise RuntimeError("ps.profile() and ps.verify() run backward; call them outside of no_grad")
    for name, module in model.named_modules():
        if getattr(module, "recomputes", False) or (
            hasattr(module, "use_pool") and getattr(module, "pool", None) is not None
        ):
            raise RuntimeError(
                f"{name} stores its tensors for a keeper, unseen by autograd; call keeper.detach() first"
            )


def _parameter_bytes(model: nn.Module, device: torch.device) -> dict[str, int]:
    """Bytes of each module's own parameters; a shared one counts with the first module that has it."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        found[owner] = found.get(owner, 0) + _bytes((parameter,), device)
    return found


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of these tensors on the device, each once."""
    local = (getattr(tensor, LOCAL_PART, tensor) for tensor in tensors)
    return sum(tensor.nbytes for tensor in dict.fromkeys(local) if tensor.device == device)


def _device_of(model: nn.Module, args: Any, kwargs: Any) -> torch.device:
    candidates = (*model.parameters(), *args, *kwargs.values())
    return next((item.device for item in candidates if isinstance(item, torch.Tensor)), torch.device("cpu"))
