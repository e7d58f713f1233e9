"""`GraphedStep`: a training step as one CUDA graph, run again on the same batch when the pool overflows."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from pagestash.policy import format_bytes
from pagestash.saved.keeper import Keeper
from pagestash.step.batch import StaticBatch
from pagestash.step.before import AllRandom, Before, Involved
from pagestash.step.garbage import no_garbage_collection
from pagestash.step.guard import StepOverflowed, UpdateGuard
from pagestash.step.rates import LearningRates
from pagestash.step.state import ProtectedState
from pagestash.torch_internals import tree_flatten, tree_map, tree_unflatten

log = logging.getLogger("pagestash")

LAG = 1
"""Steps in flight before the host looks at a flag. It looks at a fixed distance, never 'if it is there yet':
all ranks then see an overflow at the same call, and launch the same collectives."""
ATTEMPTS = 4
"""Runs of one batch. The pool grows to exactly what was wanted, so the second always fits unless the step does
something else each time."""


@dataclass(slots=True, eq=False)
class _InFlight:
    """A launched step whose flag the host has not seen: what it takes to run it again."""

    batch: list[torch.Tensor]
    rates: list[torch.Tensor | float]
    random: AllRandom
    outputs: list[Any]
    flag: torch.Tensor
    done: torch.cuda.Event


class GraphedStep:
    """Runs `train_step(*batch)`: forward, backward, and the optimizer's step if it has one.

        def train_step(tokens):
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
        for tokens in data:
            loss = step(tokens)

    The first `warmup` calls run eagerly and measure; then the pool gets its size and the step is captured. A
    steady step makes the host wait for nothing. When the pool overflows, no weight, optimizer state or buffer
    changes; the host learns of it two calls later, grows the pool to what was wanted, and runs the skipped
    batches again in order from the same random state, so that what comes out is what a large pool would have
    given. Until then a returned float reads NaN, afterwards the right value: `wait()` before you log.

    On a CPU, or with `graph=False`, the same happens within each call.

    A rerun begins where the first run did: parameters, optimizer state, gradients, buffers, a `scaler`, and every
    generator of random numbers that is torch's default, Python's or numpy's global one, or that `train_step` refers
    to. `state` names other tensors that the step changes, `scaler` and `generators` what it reaches only through
    attributes of other objects. What a step keeps in plain attributes, files or iterators is not put back;
    an iterator that `train_step` refers to is refused. With `torch.distributed` running, all ranks of `group`
    (default: all) skip and rerun together.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        keeper: Keeper,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        state: Sequence[torch.Tensor] = (),
        scaler: GradScaler | Sequence[GradScaler] = (),
        generators: Sequence[Any] = (),
        warmup: int = 2,
        graph: bool | None = None,
        group: Any = None,
    ) -> None:
        if warmup < 1:
            raise ValueError(
                f"warmup={warmup}: expected at least 1, which measures and makes optimizer state"
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
        self._involved = Involved(train_step, keeper, optimizers, state, scalers, generators)
        self._warmup = warmup
        self._graphed = device.type == "cuda" if graph is None else graph
        self._guard = UpdateGuard(keeper, optimizers, self._involved.scalers, device, group)
        self._rates = LearningRates(optimizers)
        self._constants: list[dict[str, Any]] = []
        self._grads: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: StaticBatch | None = None
        self._outputs: Any = None
        self._flags: deque[torch.Tensor] = deque()
        self._in_flight: deque[_InFlight] = deque()
        self._stream = torch.cuda.Stream(device) if self._graphed else None
        self.reruns = 0
        """Batches that were run again because a pool overflowed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._graphed or self._calls < self._warmup:
            result = self._on_stream(self._run_eagerly, args, kwargs)
            self._calls += 1  # not if it failed: warm-up measures
            return result
        if self._static is None:
            self._prepare(args, kwargs)
        elif self._constants != self._rates.constants():
            self.wait()
            self._capture()
        elif self._graph is None:  # an earlier recovery ended in an exception
            self.wait()
            if self._graph is None:
                self._capture()
        while len(self._in_flight) > LAG:
            self._look_at_oldest()
        result = self._launch(args, kwargs)
        if not self._guard.optimizers:
            self.wait()  # the caller is about to use the gradients
            self._hand_over_gradients()
        return result

    def wait(self) -> None:
        """Wait until every step so far is done, and run again what overflowed."""
        while self._in_flight:
            self._look_at_oldest()

    # --- eager: warm-up, and every step on a CPU ---

    def _run_eagerly(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        versions = self._foreign_versions()
        before = Before(self._involved)
        before.remember_gradients()
        self._protect(before)
        for _ in range(ATTEMPTS):
            overflowed, result = self._attempt(args, kwargs)
            if overflowed:
                self._guard.state.put_back()
                before.put_back()
                self._grow()
                self.reruns += 1
                continue
            self._check_foreign(versions)
            if self._graphed:
                before.buffers.refuse_replaced()
            if self._calls + 1 >= self._warmup or not self._graphed:
                self._keeper.size_pool()
            return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, result)
        raise _no_end()

    def _attempt(self, args: tuple, kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Run the step; whether it overflowed, and what it returned."""
        try:
            with self._rates_for_warmup(), self._keeper.step(check=False):
                self._guard.begin(eager=True)
                result = self._train_step(*args, **kwargs)
                self._guard.end()
        except StepOverflowed:
            return True, None
        except Exception as error:
            # The zeros of a refused group make other code raise: anomaly mode, checks of norms and pivots.
            if not self._guard.overflowed_before(error):
                raise
            log.warning("the step overflowed, and raised %s in consequence", type(error).__name__)
            return True, None
        finally:
            self._guard.leave()
        return False, result

    def _protect(self, before: Before) -> None:
        state = self._involved.state(before.buffers)
        if not self._guard.state.is_for(state):
            self._guard.state = ProtectedState(state, self._device)

    def _rates_for_warmup(self) -> AbstractContextManager[None]:
        if not self._graphed:
            return nullcontext()
        self._rates.write(self._rates.read())
        return self._rates.on_device()

    def _foreign_versions(self) -> dict[torch.Tensor, int]:
        """Versions of the parameters that none of our optimizers updates."""
        owned = {p for o in self._guard.optimizers for group in o.param_groups for p in group["params"]}
        return {p: p._version for p in self._keeper.parameters() if p not in owned}

    def _check_foreign(self, before: dict[torch.Tensor, int]) -> None:
        if any(parameter._version != version for parameter, version in before.items()):
            raise ValueError(
                "train_step changes parameters that no optimizer given to GraphedStep owns, so an overflowing "
                "step could not be undone; pass optimizer=..."
            )

    # --- in a graph ---

    def _prepare(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Capture the step for batches like this one."""
        self._guard.arm()
        stashes = any(rule.home == "stash" for rule in self._keeper.policy.rules)
        if not self._keeper.size_pool() and stashes:
            log.warning("the warm-up stashed nothing: does a rule's region run?")
        self._static = StaticBatch(args, kwargs, self._device)
        self._static.fill(self._static.copies(args, kwargs))
        self._flags.extend(torch.zeros((), pin_memory=True) for _ in range(LAG + 2))
        self._capture()

    def _capture(self) -> None:
        assert self._static is not None
        assert self._stream is not None
        self._graph = self._outputs = None  # their memory goes first
        before = Before(self._involved)
        self._protect(before)
        # The graph makes gradients of its own, anew in each replay.
        theirs = {parameter: parameter.grad for parameter in self._involved.parameters()}
        for parameter in theirs:
            parameter.grad = None
        self._constants = self._rates.constants()
        graph = torch.cuda.CUDAGraph()
        for generator in self._involved.generators.on_devices:
            graph.register_generator_state(generator)
        # thread_local: NCCL's watchdog asks for its events from a thread of its own, which a capture in the
        # default mode takes as an error.
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
            # The host has run the step's code, and the device has not: on the host nothing has happened either.
            self._guard.state.put_back(host_only=True)
            before.put_back()
        self._graph = graph
        if not self._guard.optimizers:
            self._grads = {p: p.grad for p in theirs if p.grad is not None}
            for parameter, grad in theirs.items():
                parameter.grad = grad

    def _check_captured(self, before: Before) -> None:
        before.buffers.refuse_replaced()
        left = 0 if self._keeper.pool is None else self._keeper.pool.live_tickets
        if left:
            raise RuntimeError(
                f"train_step left {left} stashed tensors without a backward: in a graph their pages would be lost "
                "at every replay. Run backward inside train_step"
            )

    def _launch(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        assert self._static is not None
        batch, rates = self._static.copies(args, kwargs), self._rates.read()
        random = AllRandom(self._involved, in_graph=True)
        outputs, tree = self._replay(batch, rates)
        flag = self._flags.popleft()
        flag.copy_(self._guard.flag, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._in_flight.append(_InFlight(batch, rates, random, outputs, flag, done))
        return tree_unflatten(outputs, tree)

    def _hand_over_gradients(self) -> None:
        """Without an optimizer in the step, add the graph's gradients to the caller's, as backward would."""
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
        """Wait for the oldest step in flight (the device goes on with the next), and recover if it overflowed."""
        oldest = self._in_flight[0]
        oldest.done.synchronize()
        if bool(oldest.flag):  # host memory
            self._recover()
        else:
            self._flags.append(self._in_flight.popleft().flag)

    def _recover(self) -> None:
        """Grow, and run everything from the overflowing step on again, in order.

        The flag is sticky: the steps launched since then have changed nothing either.
        """
        torch.cuda.synchronize(self._device)
        ahead = AllRandom(self._involved, in_graph=True)
        # A step leaves the queue only when it has been run again: an exception on the way (no memory to grow
        # into, say) loses no batch, and the next call begins here again.
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
        """Grow, and capture again if anything moved; until then the old graph's memory may be another's."""
        graph, self._graph = self._graph, None
        if self._grow() or graph is None:
            self._capture()
        else:
            self._graph = graph

    def _grow(self) -> bool:
        """Give the pool and bounded modules what was wanted and clear their flags; whether anything moved."""
        grown = False
        pool = self._keeper.pool
        if pool is not None:
            before = pool.device_pages
            self._keeper.grow_pool()
            pool.reset()
            grown = pool.device_pages > before
            if grown:
                size = format_bytes(pool.device_pages * pool.page_bytes)
                log.warning("the pool overflowed and has grown to %s; the batch runs again", size)
        for module in self._guard.bounded:
            if module.grow_capacity():
                grown = True
                log.warning(
                    "more arrived than the capacity of a layer, which has grown; the batch runs again"
                )
            module.clear_over_capacity()
        return grown

    def _on_stream(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run on the stream that capture will use, in order with the caller's: warm-up must not use another."""
        if self._stream is None:
            return run(*args)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = run(*args)
        current.wait_stream(self._stream)
        return result


def _report(leaf: Any, flag: torch.Tensor) -> Any:
    """An output of the step; NaN where the step overflowed, so that nobody takes it for a result."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    value = leaf.detach()
    return torch.where(flag > 0, torch.nan, value) if value.is_floating_point() else value


def _no_end() -> RuntimeError:
    return RuntimeError(
        f"the pool overflowed {ATTEMPTS} times on one batch though it grew to what was wanted each time: the step "
        "saves other tensors each time it runs the same batch"
    )
