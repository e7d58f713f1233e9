"""How `benchmarks.plan` measures a step of one model: eagerly, in a loop or one by one, or as a CUDA graph."""

import gc
import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import pagestash as ps
from benchmarks.plan_cases import Case
from pagestash.profiling.measure import default_loss
from pagestash.profiling.memory import MemoryMeter
from pagestash.profiling.steps import PERIOD

WARM = 3
WARM_GRAPHED, MICROBATCHES = 2, 8


class Bench:
    """One model on one device, with gradients in place."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.device = device
        self.model, self.batch = case.build(device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def measure(self, policy: ps.Policy, repeats: int) -> dict[str, Any]:
        """Seconds of steady steps, in a loop and one by one, the peak in bytes, and the loss, under a policy."""
        self._hold_gradients()
        keeper = ps.Keeper(policy).attach(self.model) if policy.rules else None
        for _ in range(WARM - 1):
            loss = self._step(keeper)
        # Counting storages takes time, which no timed step has.
        peak = self._peak(keeper)
        alone = statistics.median(self._timed(lambda: self._step(keeper)) for _ in range(repeats))
        seconds, alone_peak = alone, peak
        if self.device.type == "cuda":
            alone_peak = torch.cuda.max_memory_allocated(self.device)
            count = max(repeats, math.ceil(PERIOD / alone))
            self._loop(keeper, count)
            seconds = self._loop(keeper, count)
            peak = torch.cuda.max_memory_allocated(self.device)
        if keeper is not None:
            keeper.detach()
        gc.collect()
        return {
            "seconds": seconds,
            "alone_seconds": alone,
            "peak_bytes": peak,
            "alone_peak_bytes": alone_peak,
            "loss": loss.item(),
        }

    def _loop(self, keeper: ps.Keeper | None, count: int) -> float:
        """The device's seconds of one of `count` steps that follow each other; before them the host gets ahead."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._step(keeper)
        first.record()
        for _ in range(count):
            self._step(keeper)
        last.record()
        self._wait()
        return first.elapsed_time(last) / 1000 / count

    def measure_graphed(self, policy: ps.Policy, repeats: int) -> dict[str, Any]:
        """The same of a whole step as a CUDA graph; seconds are of a microbatch, without the optimizer."""
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps those of an earlier graph's stream
        self._hold_gradients()
        optimizer = torch.optim.SGD(self.parameters, lr=0.0, fused=True)  # the loss stays as it is
        update = statistics.median(self._timed(optimizer.step) for _ in range(WARM + repeats))
        optimizer.zero_grad()
        keeper = ps.Keeper(policy).attach(self.model)

        def train_step() -> torch.Tensor:
            for _ in range(MICROBATCHES):
                loss = self._loss()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
        for _ in range(WARM_GRAPHED):
            step()
        self._wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        loss = step()  # is captured
        self._wait()
        peak = torch.cuda.max_memory_allocated(self.device)
        times = [self._timed(step) for _ in range(repeats)]
        while sum(times) < 2 * PERIOD:
            times.append(self._timed(step))
        late = [after for at, after in enumerate(times) if sum(times[:at]) >= PERIOD] or times
        seconds = (statistics.fmean(late) - update) / MICROBATCHES
        step.wait()
        found = {"seconds": seconds, "peak_bytes": peak, "loss": loss.item()}
        del step, loss
        keeper.detach()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return found

    def _hold_gradients(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _peak(self, keeper: ps.Keeper | None) -> int:
        self._wait()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._step(keeper)
            return torch.cuda.max_memory_allocated(self.device)
        held = sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers(), *self.parameters))
        meter = MemoryMeter(self.device)
        with meter:
            meter.mark()
            self._step(keeper)
            return meter.mark().peak + held

    def _step(self, keeper: ps.Keeper | None) -> torch.Tensor:
        with nullcontext() if keeper is None else keeper.step():
            loss = self._loss()
            loss.backward()
        return loss.detach()

    def _loss(self) -> torch.Tensor:
        batch = self.batch
        return default_loss(self.model(**batch) if isinstance(batch, dict) else self.model(*batch))

    def _timed(self, call: Callable[[], object]) -> float:
        self._wait()
        begun = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
