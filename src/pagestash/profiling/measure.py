"""`profile`: run a step several times and report what it saves and how long its regions take."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from pagestash.policy import Policy
from pagestash.profiling.link import Link, find_link
from pagestash.profiling.memory import MemoryMeter
from pagestash.profiling.recorder import TensorRecorder
from pagestash.profiling.records import Segment
from pagestash.profiling.regions import make_regions
from pagestash.profiling.result import Profile
from pagestash.profiling.timeline import MODEL, Clock, EventClock, HostClock, NoClock, Timeline
from pagestash.profiling.tracker import RegionTracker
from pagestash.saved.compiled import is_compiled
from pagestash.saved.region import frames
from pagestash.torch_internals import LOCAL_PART

LEAD = 2.0
"""Head start of the host in an observed step, in step times: the host launches about half as fast there."""

Loss = Callable[[Any], torch.Tensor]
Progress = Callable[[str, int, int], None]
"""Is told what runs, its number, and the total."""


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
    """Every tensor that one step of `model` saves for backward, by region, and what each home would save and cost.

        found = ps.profile(model, (tokens, labels))
        print(found.total_bytes)
        rich.print(found.table())

    `batch` is a tensor, a tuple of arguments or a dict of keyword arguments. `loss` turns the model's output
    into a scalar. By default it is the output's `.loss`, a scalar output itself, the sum of a tuple's leading
    scalars, or the sum of a tensor. With a `policy` each tensor also has the home that the policy gives it.
    `link` is in bytes per second; by default it is measured on a GPU.

    The step runs once to warm up, once to record tensors, once to time the whole, and `repeats` times to time each
    region, always from the same random state. Gradients and buffers are restored afterwards.
    """
    args, kwargs = _arguments(batch)
    _check(model, args, kwargs, repeats)
    device = _device_of(model, args, kwargs)

    def run(
        timeline: Timeline,
        forward: AbstractContextManager[Any] | None = None,
        seen: Callable[[Any], None] | None = None,
    ) -> list[float]:
        """Run one step; the seconds of its segments (forward and backward, if `forward` observes nothing).

        `seen` is called with forward's result before backward begins.
        """
        with _state_of(model, device, args, kwargs):
            with forward or nullcontext():
                timeline.switch(MODEL)
                with torch.autocast(device.type, autocast) if autocast else nullcontext():
                    output = model(*args, **kwargs)
                value = (loss or default_loss)(output)
                _check_loss(value)
            # As at the end of an autocast block, even if the caller has one open.
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
    # On a CPU operations are counted one by one, which a compiled model does not have.
    counts = device.type != "cpu" or not any(map(is_compiled, model.modules()))
    meter = MemoryMeter(device) if counts else None
    order = Timeline(meter or NoClock())
    recorder = TensorRecorder(model, (args, kwargs), order, device, meter)
    with meter or nullcontext():
        run(order, recorder.forward(), recorder.look_around)
    tensors = recorder.tensors()
    if policy is not None:
        policy.check([*(name for name, _ in model.named_modules()), *(t.region for t in tensors)])

    times: list[list[float]] = []
    tell("timing", 2)
    plain = run(Timeline(clock()))
    for number in range(repeats):
        tell("timing by region", 3 + number)
        # Observing slows the host down, and the device must not wait for it.
        timed = Timeline(clock(lead=LEAD * sum(plain)))
        times.append(run(timed, RegionTracker(model, timed).forward()))
        if timed.paths != order.paths or timed.turn != order.turn:
            raise RuntimeError(
                "the model took another path when the same batch ran again; ps.profile() needs a repeatable step"
            )
    tell("measuring the link", repeats + 3)
    memory = [(None, None)] * len(order.paths) if meter is None else meter.readings
    segments = [
        Segment(path, "forward" if index < order.turn else "backward", statistics.median(seconds), *reading)
        for index, (path, seconds, reading) in enumerate(zip(order.paths, zip(*times), memory))
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
        model_bytes=_bytes((*model.parameters(), *model.buffers()), device),
        gradient_bytes=_bytes((p for p in model.parameters() if p.requires_grad), device),
        parameter_bytes=_parameter_bytes(model, device),
    )


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


@contextmanager
def _state_of(model: nn.Module, device: torch.device, args: Any, kwargs: Any) -> Iterator[None]:
    """Run a step from the same state as every other; restores gradients, buffers and random state afterwards."""
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
            "ps.profile() inside a keeper's step would profile what the keeper does; call it outside"
        )
    if not torch.is_grad_enabled():
        raise RuntimeError("ps.profile() under no_grad: nothing is saved there; call it outside")
    for name, module in model.named_modules():
        if getattr(module, "recomputes", False) or (
            hasattr(module, "use_pool") and getattr(module, "pool", None) is not None
        ):
            raise RuntimeError(
                f"{name} stores its tensors for a keeper, unseen by autograd; call keeper.detach() first"
            )


def _check_loss(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"the loss is {shape}: expected a tensor of one element")
    if value.grad_fn is None:
        raise ValueError(
            "the loss has no graph: no parameter requires a gradient, or forward ran under no_grad"
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
