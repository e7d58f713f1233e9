"""A step that runs again and again from the same state: the same batch, random numbers, buffers and gradients."""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from pagestash.profiling.timeline import MODEL, EventClock, Timeline
from pagestash.torch_internals import LOCAL_PART

PERIOD = 1.0
"""Seconds. Under full load an H200 draws more power than it may, and lowers its clock: for the first 0.7 s after a
rest steps are up to 4 % faster than later, then some are 20 % slower, and so on about once a second. So a loop is
timed after one such period, for another, and its mean counts."""
MOST_IN_PERIOD, LEAST_TIMED = 40, 5
"""Steps: of small ones no more are run, however short they are, and of large ones no fewer are timed."""

WAITED = "called a synchronizing CUDA operation"
"""What torch says of one, if it is asked to warn."""


@dataclass(frozen=True, slots=True)
class RepeatedStep:
    """Forward, loss and backward of `model` on one batch."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    loss: Callable[[Any], torch.Tensor]
    held: bool = True
    """Whether a run finds gradients in place, and adds to them."""
    autocast: torch.dtype | None = None

    def run(
        self,
        timeline: Timeline,
        forward: AbstractContextManager[Any] | None = None,
        seen: Callable[[Any, torch.Tensor], None] | None = None,
    ) -> list[float]:
        """Run once; the seconds of its segments (forward and backward, if `forward` observes nothing).

        `seen` is called with forward's result and the loss before backward begins.
        """
        with self._state():
            self._wait()
            with forward or nullcontext():
                timeline.switch(MODEL)
                with torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext():
                    output = self.model(*self.args, **self.kwargs)
                value = self.loss(output)
                _check_loss(value)
            # As at the end of an autocast block, even if the caller has one open.
            torch.clear_autocast_cache()
            if seen is not None:
                seen(output, value)
            del output
            timeline.begin_backward(value if forward else None)
            value.backward()
            return timeline.finish()

    def run_in(self, around: AbstractContextManager[Any]) -> float:
        """Run once inside a context, unobserved; the seconds until the device is done."""
        with self._state():
            self._wait()
            begin = time.perf_counter()
            self.run_once(around)
            self._wait()
            return time.perf_counter() - begin

    def time_loop(self, around: Callable[[], AbstractContextManager[Any]], one: float) -> float:
        """A step's seconds in a loop on a GPU under lasting load (`PERIOD`); by itself it takes about `one`."""
        settle = min(MOST_IN_PERIOD, math.ceil(PERIOD / one))
        count = max(LEAST_TIMED, settle)
        return statistics.fmean(self.run_loop(around, settle + count)[settle:])

    def run_loop(self, around: Callable[[], AbstractContextManager[Any]], count: int) -> list[float]:
        """Run `count` times on a GPU, each inside a context of its own, unobserved; the device's seconds of each.

        As in training, the host waits for none of them. One more runs before them, in which it gets ahead.
        """
        clock = EventClock()
        marks = []
        with self._state():
            for _ in range(count + 1):
                self._clear()
                self.run_once(around())
                marks.append(clock.mark())
            return clock.between(marks)

    def waits_within(self) -> bool:
        """Run once; whether the host waits for the device in it, as far as torch sees that."""
        before = torch.cuda.get_sync_debug_mode()
        with self._state(), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self.run_once(nullcontext())
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return any(WAITED in str(warning.message) for warning in seen)

    def run_once(self, around: AbstractContextManager[Any]) -> torch.Tensor:
        """Run once inside a context; the loss. Nothing is restored."""
        with around:
            with torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext():
                output = self.model(*self.args, **self.kwargs)
            value = self.loss(output)
            del output
            torch.clear_autocast_cache()
            _check_loss(value)
            value.backward()
            return value.detach()

    @property
    def buffer_bytes(self) -> int:
        """Of the copies of buffers that a run takes."""
        return sum(buffer.nbytes for buffer in self.model.buffers() if buffer.device == self.device)

    def launch_forward(self, around: AbstractContextManager[Any]) -> float:
        """Run forward alone, inside a context; the host's seconds to launch it."""
        with self._state():
            self._wait()
            with around:
                begin = time.perf_counter()
                with torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext():
                    output = self.model(*self.args, **self.kwargs)
                value = self.loss(output)
                seconds = time.perf_counter() - begin
                del output, value
            torch.clear_autocast_cache()
            return seconds

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Around all runs: gradients for them to find, and afterwards those of the caller again."""
        before = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # (Gradients of these runs are nobody's: ranks do not average them.)
        alone = self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()
        try:
            for parameter, gradient in before:
                if not self.held or not parameter.requires_grad or is_lazy(parameter):
                    parameter.grad = None
                elif gradient is None or gradient.layout != torch.strided or gradient.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
                else:
                    # On the host: the device may have no room for a second set.
                    local = getattr(gradient, LOCAL_PART, gradient).detach()
                    copies.append((local, local.to("cpu", copy=True)))
            with alone:
                yield
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
            for local, copy in copies:
                local.copy_(copy)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _given(self) -> list[torch.Tensor]:
        """The batch's tensors that may get gradients."""
        return [t for t in (*self.args, *self.kwargs.values()) if isinstance(t, torch.Tensor) and t.is_leaf]

    def _clear(self) -> None:
        """A run finds no gradients of the batch, and of parameters only those that it is to find."""
        for tensor in self._given() if self.held else (*self._given(), *self.model.parameters()):
            tensor.grad = None

    @contextmanager
    def _state(self) -> Iterator[None]:
        """Restores buffers, random state and the gradients of the batch."""
        gradients = [(tensor, tensor.grad) for tensor in self._given()]
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        self._clear()
        try:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                yield
        finally:
            for tensor, gradient in gradients:
                tensor.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _check_loss(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"the loss is {shape}: expected a tensor of one element")
    if value.grad_fn is None:
        raise ValueError(
            "the loss has no graph: no parameter requires a gradient, or forward ran under no_grad"
        )
