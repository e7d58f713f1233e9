"""`overlap`: one microbatch's forward and another's backward, the exchanges of each under the compute of the other.

    compute         B norm, head │ F attention │ B experts  │ F experts  │ B attention │ F attention │ …
    communication                │ B combine'  │ F dispatch │ B dispatch'│ F combine   │ B combine'  │ …

The two halves run in two host threads, of which one runs at a time. A half that has started an exchange and now
needs its result passes the turn to the other (`pause`), which starts one of its own, and so on. So the order of all
launches is that of the two programs alone, and the same on every rank, as collectives must be.

The turn is passed nowhere else. Not in a forward that backward runs again (recompute, checkpointing): for that time
random states and buffers are those of the first forward, and the other half must not see them.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from pagestash.saved.streams import current_stream

T = TypeVar("T")
U = TypeVar("U")
Direction = Literal["forward", "backward"]

_OTHER: dict[Direction, Direction] = {"forward": "backward", "backward": "forward"}


class _Stopped(BaseException):  # no `except Exception` of a half may catch it
    """The other half has raised, and this one ends."""


class _Pair:
    """Two halves that take turns."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._over: set[Direction] = set()
        self._turns = {half: threading.Semaphore(0) for half in _OTHER}

    def wait(self, half: Direction) -> None:
        """Wait for the turn of `half`."""
        try:
            self._turns[half].acquire()
        except BaseException as error:  # Ctrl-C: the other half runs, and goes on to its next pause
            self.errors.append(error)
            self._turns[half].acquire()
            raise
        if self.errors:
            raise _Stopped

    def pass_on(self, half: Direction) -> None:
        """Let the other half run until it passes the turn back, or ends."""
        if _OTHER[half] not in self._over:
            self._turns[_OTHER[half]].release()
            self.wait(half)

    def run(self, half: Direction, function: Callable[[], Any], *, waits: bool) -> Any:
        """Run a half to its end, and leave the turns to the other."""
        _running.set((self, half))
        try:
            if waits:
                self.wait(half)
            return function()
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._over.add(half)
            self._turns[_OTHER[half]].release()


_running: ContextVar[tuple[_Pair, Direction] | None] = ContextVar("pagestash_half", default=None)
"""The half that runs in this context."""


def overlap(forward: Callable[[], T], backward: Callable[[], U]) -> tuple[T, U]:
    """Run `forward` of one microbatch and `backward` of another interleaved; the results of both.

        loss, _ = overlap(lambda: model(second), first_loss.backward)

    Each passes the turn where it waits for an exchange of an expert-parallel layer; with none in one of them they
    run one after the other, backward first. They must not depend on each other. All results have the bits that they
    have without overlap. If one raises, the other is ended at its next exchange, and the error is raised here. All
    ranks that share experts must run pairs of the same layers.

    `backward` runs in a second thread, on the device and the stream of the caller, and so do all nodes of its
    graph, those of a GPU included.
    """
    if _running.get() is not None:
        raise RuntimeError("overlap() inside of one half of another: the halves of a pair are two, not more")
    pair, here = _Pair(), _as_here()

    def run_backward() -> U:
        with here():
            return backward()

    # An empty context, as autograd's own threads have: what backward runs again opens no region of the step.
    done = _worker().submit(Context().run, pair.run, "backward", run_backward, waits=False)
    try:
        result = copy_context().run(pair.run, "forward", forward, waits=True)
        given = done.result()
        if pair.errors:
            raise pair.errors[0]
        return result, given
    finally:
        pair.errors.clear()  # which have this frame in their traceback


_workers = threading.local()


def _worker() -> ThreadPoolExecutor:
    """The thread of this one's backwards. The same in every step: cuDNN compiles attention anew for each thread."""
    if not hasattr(_workers, "backward"):
        _workers.backward = ThreadPoolExecutor(1, "pagestash-backward")
    return _workers.backward


def step_in_halves(
    loss_of: Callable[..., torch.Tensor], *batch: torch.Tensor, parts: int = 2
) -> torch.Tensor:
    """Forward and backward of a batch in `parts`, each part's backward under the next one's forward.

        loss = step_in_halves(lambda tokens, labels: model(tokens, labels), tokens, labels)
        optimizer.step()

    `loss_of` is given a part of each tensor of `batch`, cut along the first dimension, and gives its mean loss. The
    gradients are those of the mean over parts, which is returned. The first forward and the last backward have
    nothing beside them: of `parts` passes each way, `parts - 1` are overlapped.
    """
    chunks = [each.chunk(parts) for each in batch]
    if any(len(each) != parts for each in chunks):
        raise ValueError(f"parts={parts}: the batch has {[len(each) for each in batch]} rows")

    def forward(index: int) -> torch.Tensor:
        return loss_of(*(each[index] for each in chunks)) / parts

    loss = forward(0)
    total = loss.detach()
    for index in range(1, parts):
        loss, _ = overlap(partial(forward, index), loss.backward)
        total = total + loss.detach()
    loss.backward()
    return total


def _as_here() -> Callable[[], Any]:
    """A context in which another thread works as this one does."""
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    stream = None if index is None else current_stream(index)
    autocasts = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in ("cuda", "cpu")
        if torch.is_autocast_enabled(kind)
    ]

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.device(index))
                stack.enter_context(torch.cuda.stream(stream))
            for kind, dtype, cached in autocasts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
            # Autograd's own thread for the device has no context, and only one backward at a time: one that the
            # forward half runs inside would wait for ours, which waits for its turn.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    return enter


def pause(direction: Direction) -> None:
    """An exchange of a forward or a backward is under way, and its result is needed now: run what else there is.

    A dispatch of your own calls it before it waits.
    """
    if direction == "forward":
        beside = _beside.get()
        if beside is not None:
            beside.run()
    running = _running.get()
    if running is not None and running[1] == direction:
        running[0].pass_on(direction)


class Beside:
    """Work to run while an exchange is under way: at the first forward `pause` in `waiting`, or when asked for.

    It runs in the context in which it was made, not in that of the module that waits.
    """

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self._context, self._work = copy_context(), work
        self._result: torch.Tensor | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Run the work at the first forward `pause` inside."""
        token = _beside.set(self)
        try:
            yield
        finally:
            _beside.reset(token)

    def run(self) -> None:
        """Run the work, if it has not run yet."""
        if self._result is None:
            self._result = self._context.run(self._work)

    def result(self) -> torch.Tensor:
        self.run()
        assert self._result is not None
        return self._result


_beside: ContextVar[Beside | None] = ContextVar("pagestash_beside", default=None)
