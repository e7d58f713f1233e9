"""`profile`: run a step a few times, and say what it saved and how long its regions took."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from pagestash.policy import Policy
from pagestash.profiling.link import Link, find_link
from pagestash.profiling.recorder import TensorRecorder
from pagestash.profiling.records import Segment
from pagestash.profiling.regions import make_regions
from pagestash.profiling.result import Profile
from pagestash.profiling.timeline import MODEL, Clock, EventClock, HostClock, NoClock, Timeline
from pagestash.profiling.tracker import RegionTracker
from pagestash.saved.region import frames

LEAD = 2.0
"""Head start of the host in a step that is watched, in steps: it launches about half as fast then."""

Loss = Callable[[Any], torch.Tensor]
Progress = Callable[[str, int, int], None]
"""Told what runs, and as which of how many."""


def profile(
    model: nn.Module,
    batch: torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any],
    *,
    loss: Loss | None = None,
    policy: Policy | None = None,
    link: float | Link | None = None,
    autocast: torch.dtype | None = None,
    repeats: int = 3,
    progress: Progress | None = None,
) -> Profile:
    """Every tensor that one step of `model` saves for backward, by region, and what each home would make of it.

        found = ps.profile(model, (tokens, labels))
        print(found.total_bytes)
        rich.print(found.table())

    `batch` is a tensor, a tuple of arguments or a dict of keyword arguments. `loss` makes a scalar of what the
    model returns; without it a scalar is taken as it is, leading scalars of a tuple are added up, `.loss` is
    used where there is one, and any other tensor is summed. With a `policy` each tensor also has the home that
    the policy would give it. `link` is in bytes a second; without it a GPU's is measured.

    The step runs once to warm up, once to be recorded, once to be timed as it is and `repeats` times region by
    region, always from the same random state; gradients and buffers are put back afterwards.
    """
    args, kwargs = _arguments(batch)
    _check(model, args, kwargs, repeats)
    device = _device_of(model, args, kwargs)

    def run(
        timeline: Timeline,
        forward: AbstractContextManager[Any] | None = None,
        seen: Callable[[Any], None] | None = None,
    ) -> list[float]:
        """One step, and the seconds of its segments: two, where `forward` watches nothing.

        `seen` looks at forward's result before backward begins.
        """
        with _state_of(model, device, args, kwargs):
            with forward or nullcontext():
                timeline.switch(MODEL)
                with torch.autocast(device.type, autocast) if autocast else nullcontext():
                    output = model(*args, **kwargs)
                value = (loss or default_loss)(output)
                _check_loss(value)
            # As at the end of an autocast block, also where the caller's is still open.
            torch.clear_autocast_cache()
            if seen is not None:
                seen((output, value))
            del output
            timeline.begin_backward(value if forward else None)
            value.backward()
            return timeline.finish()

    def tell(what: str, number: int) -> None:
        if progress is not None:
            progress(what, number, repeats + 4)

    def clock(lead: float = 0.0) -> Clock:
        return EventClock(lead) if device.type == "cuda" else HostClock()

    tell("warming up", 0)
    run(Timeline(NoClock()))

    tell("recording what is saved", 1)
    order = Timeline(NoClock())
    recorder = TensorRecorder(model, (args, kwargs), order, device)
    run(order, recorder.forward(), recorder.look_around)
    tensors = recorder.tensors()
    if policy is not None:
        policy.check([*(name for name, _ in model.named_modules()), *(t.region for t in tensors)])

    times: list[list[float]] = []
    tell("timing", 2)
    plain = run(Timeline(clock()))
    for number in range(repeats):
        tell("timing by region", 3 + number)
        # Watching slows the host down, which must not leave the device waiting.
        timed = Timeline(clock(lead=LEAD * sum(plain)))
        times.append(run(timed, RegionTracker(model, timed).forward()))
        if timed.paths != order.paths or timed.turn != order.turn:
            raise RuntimeError(
                "the model took another path when the same batch ran again; ps.profile() needs a step that repeats"
            )
    tell("measuring the link", repeats + 3)
    segments = [
        Segment(path, "forward" if index < order.turn else "backward", statistics.median(seconds))
        for index, (path, seconds) in enumerate(zip(order.paths, zip(*times)))
    ]
    speed = find_link(device, link)
    tell("done", repeats + 4)
    return Profile(
        device=str(device),
        link=speed,
        tensors=tensors,
        regions=make_regions(tensors, segments, recorder, speed),
        segments=segments,
        plain_seconds=sum(plain),
        allocated_bytes=recorder.allocated_bytes,
        policy=policy,
    )


def default_loss(output: Any) -> torch.Tensor:
    """The scalar to train on, from what a model returned."""
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
    raise ValueError(f"the model returned {type(output).__name__}: give loss=, which makes a scalar of it")


@contextmanager
def _state_of(model: nn.Module, device: torch.device, args: Any, kwargs: Any) -> Iterator[None]:
    """A step from the same state as every other, that leaves gradients, buffers and random state as they were."""
    leaves = [*model.parameters(), *(t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))]
    gradients = [(leaf, leaf.grad) for leaf in leaves if leaf.is_leaf]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for leaf, _ in gradients:
        leaf.grad = None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise ValueError(
        f"batch is a {type(batch).__name__}: expected a tensor, a tuple of arguments or a dict of keyword arguments"
    )


def _check(model: Any, args: Any, kwargs: Any, repeats: int) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: expected an nn.Module")
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: expected at least 1")
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if not (args or kwargs) or (tensors and not any(tensor.numel() for tensor in tensors)):
        raise ValueError("batch is empty: expected at least one tensor with elements")
    if frames():
        raise RuntimeError(
            "ps.profile() inside a keeper's step would see what the keeper did; call it outside"
        )
    if not torch.is_grad_enabled():
        raise RuntimeError("ps.profile() under no_grad: nothing is saved there; call it outside")
    for name, module in model.named_modules():
        if getattr(module, "recomputes", False) or (
            hasattr(module, "use_pool") and getattr(module, "pool", None) is not None
        ):
            raise RuntimeError(
                f"{name} puts its tensors away for a keeper, unseen by autograd; call keeper.detach() first"
            )


def _check_loss(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"the loss is {shape}: expected a tensor of one element")
    if value.grad_fn is None:
        raise ValueError(
            "the loss has no graph: no parameter requires a gradient, or forward ran under no_grad"
        )


def _device_of(model: nn.Module, args: Any, kwargs: Any) -> torch.device:
    candidates = (*model.parameters(), *args, *kwargs.values())
    return next((item.device for item in candidates if isinstance(item, torch.Tensor)), torch.device("cpu"))
