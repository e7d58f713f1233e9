"""`GraphedStep`: a training step as one CUDA graph, rerun on the same batch when the pool overflows."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from pagestash.garbage import no_garbage_collection
from pagestash.saved.keeper import Keeper
from pagestash.step.expected import ExpectedRows
from pagestash.step.guard import StepOverflowed, UpdateGuard
from pagestash.step.inputs import LearningRates, StaticBatch, as_tensors
from pagestash.step.state import Before, Involved, ProtectedState, RandomStates, Weights, on_device
from pagestash.torch_internals import tree_flatten, tree_map, tree_unflatten

log = logging.getLogger("pagestash")

LAG = 1
"""Steps in flight before the host reads a flag. The distance is fixed, and never depends on whether the flag has
arrived: so all ranks see an overflow at the same call, and launch the same collectives."""
ATTEMPTS = 4
"""Most runs of one batch. The pool grows to what was wanted, so the second run fits, unless the step saves
something else each time."""


@dataclass(slots=True, eq=False)
class _InFlight:
    """A launched step whose flag the host has not read, with everything that a rerun needs."""

    batch: list[torch.Tensor]
    rates: list[torch.Tensor | float]
    random: RandomStates
    outputs: list[Any]
    flag: torch.Tensor
    done: torch.cuda.Event


class GraphedStep:
    """Runs `train_step(*batch)`: forward, backward, and usually the optimizer's step, as one CUDA graph.

        def train_step(tokens):
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
        for tokens in data:
            loss = step(tokens)

    The first `warmup` calls run eagerly and measure. Then the pool is sized and the step is captured. In a steady
    step the host waits for nothing.

    An overflow of the pool changes no weight, optimizer state or buffer. The host sees it two calls later,
    grows the pool to what was wanted, and reruns the skipped batches in order, from the same random state: the
    results are those of a pool that was large enough. Until then a returned float is NaN, afterwards the right
    value. Call `wait()` before you log.

    A NumPy array in the batch comes to `train_step` as a tensor. Other values that are no tensors must not change.

    On a CPU, or with `graph=False`, the step runs eagerly, and an overflow is handled within the call.

    A rerun restores parameters, optimizer state, gradients, the buffers of the keeper's model, and the default
    generators of torch, Python and numpy. Name what else the step uses: its gradient `scaler`, `generators` of
    its own, and as `state` other tensors that it changes and modules outside the keeper's model. A scaler that was
    not named is an error, and so is such a generator of the GPU in a graph. Nothing can tell of a generator of the
    host, a tensor or an iterator: a rerun draws other numbers, adds twice and takes the next item. Pass what comes
    from an iterator as an argument. Plain attributes and files are not restored.

    Weights that the step changes by itself, such as a momentum encoder's, belong to `state`, and must be written in
    place. Warm-up steps refuse others by name.

    With `torch.distributed`, all ranks of `group` (default: all) skip and rerun together.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        keeper: Keeper,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        state: Sequence[torch.Tensor | torch.nn.Module] = (),
        scaler: GradScaler | Sequence[GradScaler] = (),
        generators: Sequence[Any] = (),
        warmup: int = 2,
        graph: bool | None = None,
        group: Any = None,
    ) -> None:
        if warmup < 1:
            raise ValueError(
                f"warmup={warmup}: expected at least 1, to measure and to create optimizer state"
            )
        device = keeper.device
        if device is None:
            raise ValueError("keeper: attach it to the model first, keeper.attach(model)")
        if graph and device.type != "cuda":
            raise ValueError(f"graph=True: a CUDA graph needs a model on a GPU, this one is on {device}")
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        if group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            group = dist.group.WORLD
        self._train_step = train_step
        self._keeper = keeper
        self._device = device
        scalers = [scaler] if isinstance(scaler, GradScaler) else scaler
        self._involved = Involved(keeper, optimizers, state, scalers, generators)
        self._warmup = warmup
        self._graphed = device.type == "cuda" if graph is None else graph
        self._guard = UpdateGuard(keeper, optimizers, self._involved.scalers, device, group)
        self._rates = LearningRates(optimizers)
        self._expected = ExpectedRows(keeper, self._guard.ranks)
        self._warned = False
        self._grads: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: StaticBatch | None = None
        self._outputs: Any = None
        self._flags: deque[torch.Tensor] = deque()
        self._in_flight: deque[_InFlight] = deque()
        self._stream = torch.cuda.Stream(device) if self._graphed else None
        self.reruns = 0
        """Reruns so far, because the pool or a capacity overflowed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = as_tensors((args, kwargs))
        if not self._graphed or self._calls < self._warmup:
            result = self._on_stream(self._run_eagerly, args, kwargs)
            self._calls += 1  # not if it failed: every warm-up step must have measured
            if not self._graphed and self._expected.change_here():
                self._expected.adopt()
            return result
        if self._static is None:
            self._prepare(args, kwargs)
        elif changed := self._rates.changed():
            if not self._warned:
                self._warned = True
                log.warning(
                    "the step is captured again whenever one of these settings of the optimizer changes, which are "
                    "constants of the graph: %s. Let a schedule change the learning rate alone (OneCycleLR takes "
                    "cycle_momentum=False)",
                    ", ".join(changed),
                )
            self.wait()
            self._capture()
        elif self._graph is None:  # an earlier recovery ended in an exception, or the last step ran eagerly
            self.wait()
            if self._graph is None:
                self._capture()
        while len(self._in_flight) > LAG:
            self._look_at_oldest()
        if self._expected.change():
            self.wait()
            self._graph = self._outputs = None  # frees their memory before the pool takes other memory
            self._expected.adopt()
            if self._expected.leave():
                return self._on_stream(self._run_eagerly, args, kwargs)
            self._capture()
        result = self._launch(args, kwargs)
        if not self._guard.optimizers:
            self.wait()  # the caller will use the gradients
            self._hand_over_gradients()
        return result

    def wait(self) -> None:
        """Wait until every step so far is done; rerun those that overflowed."""
        while self._in_flight:
            self._look_at_oldest()

    # --- eager: the warm-up, and every step on a CPU ---

    def _run_eagerly(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        weights = Weights(self._involved) if self._calls < self._warmup else None
        before = Before(self._involved)
        before.remember_gradients()
        self._protect(before)
        for _ in range(ATTEMPTS):
            overflowed, result = self._attempt(args, kwargs, weights)
            if weights is not None:
                weights.refuse_written(updated=not overflowed)
            self._refuse_moved()
            if overflowed:
                self._guard.state.put_back()
                before.put_back()
                self._grow()
                self.reruns += 1
                continue
            if self._graphed:
                before.buffers.refuse_replaced()
            if self._calls + 1 >= self._warmup or not self._graphed:
                self._keeper.size_pool()
            return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, result)
        raise _no_end()

    def _attempt(self, args: tuple, kwargs: dict[str, Any], weights: Weights | None) -> tuple[bool, Any]:
        """Run the step: whether it overflowed, and what it returned."""
        try:
            with self._rates_for_warmup(), self._keeper.step(check=False):
                self._guard.begin(eager=True, weights=weights)
                result = self._train_step(*args, **kwargs)
                self._guard.end()
        except StepOverflowed:
            return True, None
        except Exception as error:
            # The zeros of a refused group make other code raise: anomaly mode, checks of norms and pivots.
            if not self._guard.overflowed_before(error):
                raise
            log.warning("the step overflowed, and raised %s as a consequence", type(error).__name__)
            return True, None
        finally:
            self._guard.leave()
        return False, result

    def _protect(self, before: Before) -> None:
        state = self._involved.tensors(before.buffers)
        if not self._guard.state.is_for(state):
            self._guard.state = ProtectedState(state, self._device)

    def _rates_for_warmup(self) -> AbstractContextManager[None]:
        if not self._graphed:
            return nullcontext()
        self._rates.write(self._rates.read())
        return self._rates.on_device()

    def _refuse_moved(self) -> None:
        for tensor in self._guard.state.moved():
            raise ValueError(
                f"train_step gives {self._involved.name_of(tensor)!r} other memory (tensor.data = ...), which an "
                "overflowing step could not undo; write to it in place (tensor.copy_(...))"
            )

    # --- in a graph ---

    def _prepare(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Capture the step for batches with the structure and shapes of this one."""
        self._guard.arm()
        stashes = any(rule.home == "stash" for rule in self._keeper.policy.rules)
        sized = self._keeper.size_pool()
        if self._warmup < 2 and self._keeper.rows is not None and self._keeper.rows.leave:
            raise ValueError(
                f"warmup={self._warmup}: with expected_rows='auto' under a stash rule with a fraction, offload "
                "measures the step after the one that chose the rows; expected 2 or more"
            )
        if not sized and stashes:
            log.warning("the warm-up stashed nothing: does any region with a stash rule run?")
        self._static = StaticBatch(args, kwargs, self._device)
        self._static.fill(self._static.copies(args, kwargs))
        self._flags.extend(torch.zeros((), pin_memory=True) for _ in range(LAG + 2))
        self._capture()

    def _capture(self) -> None:
        assert self._static is not None
        assert self._stream is not None
        self._graph = self._outputs = None  # frees their memory first
        # A graph has memory of its own. That of an earlier one would stay reserved, and the next could not use it.
        torch.cuda.empty_cache()
        before = Before(self._involved)
        self._protect(before)
        # The graph has its own gradients, written in each replay.
        theirs = {parameter: parameter.grad for parameter in self._involved.parameters()}
        for parameter in theirs:
            parameter.grad = None
        self._rates.captured()
        graph = torch.cuda.CUDAGraph()
        for generator in on_device(self._involved.generators):
            graph.register_generator_state(generator)
        # thread_local: NCCL's watchdog queries events from another thread, which is an error for a capture in
        # the default mode.
        capture = torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")
        try:
            with self._rates.on_device(), no_garbage_collection(), capture:
                args, kwargs = self._static.arguments
                self._guard.begin(eager=False)
                with self._keeper.step(check=False):
                    result = self._train_step(*args, **kwargs)
                    self._guard.end()
                self._outputs = tree_map(lambda leaf: _report(leaf, self._guard.flag), result)
                del result
            self._check_captured(before)
        except BaseException:
            for parameter, grad in theirs.items():
                parameter.grad = grad
            raise
        finally:
            self._guard.leave()
            # The host has run the step's code, but the device has not: undo what the host did.
            self._guard.state.put_back(host_only=True)
            before.put_back()
        self._graph = graph
        if not self._guard.optimizers:
            self._grads = {p: p.grad for p in theirs if p.grad is not None}
            for parameter, grad in theirs.items():
                parameter.grad = grad

    def _check_captured(self, before: Before) -> None:
        before.buffers.refuse_replaced()
        self._refuse_moved()
        left = 0 if self._keeper.pool is None else self._keeper.pool.live_tickets
        if left:
            raise RuntimeError(
                f"train_step left {left} stashed tensors without a backward: in a graph every replay would lose "
                "their pages. Run backward inside train_step"
            )

    def _launch(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        assert self._static is not None
        batch, rates = self._static.copies(args, kwargs), self._rates.read()
        random = RandomStates(self._involved, in_graph=True)
        outputs, tree = self._replay(batch, rates)
        flag = self._flags.popleft()
        flag.copy_(self._guard.flag, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._in_flight.append(_InFlight(batch, rates, random, outputs, flag, done))
        return tree_unflatten(outputs, tree)

    def _hand_over_gradients(self) -> None:
        """Add the graph's gradients to the caller's, as backward would, if the step has no optimizer."""
        for parameter, grad in self._grads.items():
            if parameter.grad is None:
                parameter.grad = grad.clone()
            else:
                parameter.grad.add_(grad)

    def _replay(self, batch: list[torch.Tensor], rates: list[torch.Tensor | float]) -> tuple[list[Any], Any]:
        assert self._static is not None
        assert self._graph is not None
        self._static.fill(batch)
        self._rates.write(rates)
        self._graph.replay()
        leaves, tree = tree_flatten(self._outputs)
        return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree

    # --- overflow ---

    def _look_at_oldest(self) -> None:
        """Wait for the oldest step in flight (the device continues with the next); recover if it overflowed."""
        oldest = self._in_flight[0]
        oldest.done.synchronize()
        if bool(oldest.flag):  # host memory
            self._recover()
        else:
            self._flags.append(self._in_flight.popleft().flag)

    def _recover(self) -> None:
        """Grow, and rerun the overflowing step and all that were launched after it, in order.

        The flag is sticky: the steps after the overflow have changed nothing, either.
        """
        torch.cuda.synchronize(self._device)
        ahead = RandomStates(self._involved, in_graph=True)
        # A step leaves the queue only after its rerun: an exception on the way (no memory to grow into, for one)
        # loses no batch, and the next call continues here.
        for number in range(len(self._in_flight)):
            step = self._in_flight[0]
            for attempt in range(ATTEMPTS):
                if attempt or number == 0:
                    self._grow_and_capture()
                step.random.put_back()
                outputs, _ = self._replay(step.batch, step.rates)
                self.reruns += 1
                if not bool(self._guard.flag):
                    break
            else:
                raise _no_end()
            for given, right in zip(step.outputs, outputs):
                if isinstance(given, torch.Tensor):
                    given.copy_(right)
            self._flags.append(self._in_flight.popleft().flag)
        ahead.put_back()

    def _grow_and_capture(self) -> None:
        """Grow, and capture again if anything moved; the old graph is unusable then: its memory may be reused."""
        graph, self._graph = self._graph, None
        if self._grow() or graph is None:
            del graph  # its memory is freed before the next one is captured
            self._capture()
        else:
            self._graph = graph

    def _grow(self) -> bool:
        """Grow everything that was too small to what was wanted; whether anything moved."""
        grown = [bound.grow() for bound in self._guard.bounds]
        return any(grown)

    def _on_stream(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run on the stream of the capture, which the warm-up must use, too, ordered with the caller's stream."""
        if self._stream is None:
            return run(*args)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = run(*args)
        current.wait_stream(self._stream)
        return result


def _report(leaf: Any, flag: torch.Tensor) -> Any:
    """An output of the step, NaN if the step overflowed, so that it cannot be mistaken for a result."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    value = leaf.detach()
    return torch.where(flag > 0, torch.nan, value) if value.is_floating_point() else value


def _no_end() -> RuntimeError:
    return RuntimeError(
        f"the pool overflowed {ATTEMPTS} times on one batch, although it grew to what was wanted each time: the "
        "step saves different tensors each time it runs the same batch"
    )
