"""Track which region is running: modules, named `ps.region`s, and what a fused operation claims."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pagestash.policy import Policy
from pagestash.profiling.timeline import MODEL, Path, Timeline
from pagestash.saved.calls import begin, end, set_calls, under_way
from pagestash.saved.compiled import hidden, is_compiled
from pagestash.saved.module_hook import Hook
from pagestash.saved.names import named_modules
from pagestash.saved.region import Region, enter, frames, leave, set_frames
from pagestash.saved.rows.marks import Marks

T = TypeVar("T")


class ModuleListener(Protocol):
    """Is told the inputs and outputs of modules, and what `ps.once` returns."""

    def entered(self, name: str, module: nn.Module, given: Any) -> None: ...

    def left(self, name: str, result: Any) -> None: ...

    def decided(self, result: Any) -> None: ...


class RegionTracker:
    """Enters a region for every module of `model` that runs, and cuts the timeline there.

    It owns regions like a keeper, so that `ps.region` and `claim` work without one. Its policy is empty, so it
    moves nothing.
    """

    policy = Policy()

    def __init__(self, model: nn.Module, timeline: Timeline, listener: ModuleListener | None = None) -> None:
        self.timeline = timeline
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.calls: dict[Path, int] = {}
        # Observing every operation costs time; without a listener the step is timed.
        self.marks = Marks(on=listener is not None)
        self.weights: set[int] = set()
        self.inside_once = False
        self._blocks: set[Region] = set()
        self._listener = listener
        self._hooked = False
        self._modules = list(watched(model))
        self.names[model] = ""
        for name, module in named_modules(model).items():
            self.names[module] = name

    def path(self) -> Path:
        """The running regions; a `ps.region` without a name belongs to the one around it."""
        names = [frame.name for frame in frames() if frame.owner is self]
        return tuple(name for index, name in enumerate(names) if index == 0 or name != names[index - 1])

    def block(self) -> str:
        """The innermost running region that is no module; "" if there is none."""
        return next((frame.name for frame in reversed(frames()) if frame in self._blocks), "")

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Track regions within this context. Backward needs none: nodes know where they were created."""
        outer, calls = frames(), under_way()
        root = Region(self, "", None)
        with self.hooked():
            enter(root)
            self._switch()
            try:
                yield
            finally:
                leave(root)
                set_frames(outer)
                set_calls(calls)
                self.marks.forget()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch modules within this context, also where a part of forward runs again in backward."""
        if self._hooked:
            yield
            return
        self._hooked = True
        hooks = [hook for name, module in self._modules for hook in self._hook(name, module)]
        try:
            yield
        finally:
            self._hooked = False
            for hook in hooks:
                hook.remove()

    def open(self, region: Region) -> None:
        self._blocks.add(region)
        if self._switch():
            self._count()

    def close(self, region: Region) -> None:
        self._blocks.discard(region)
        self._switch()

    def check_stream(self, region: str) -> None:
        """Nothing moves."""

    def run_once(self, fn: Callable[[], T]) -> T:
        """What `ps.once` runs: a recomputed region around it would hold what it saves, and its result."""
        outer, self.inside_once = self.inside_once, True
        try:
            result = fn()
        finally:
            self.inside_once = outer
        if self._listener is not None:
            self._listener.decided(result)
        return result

    def _hook(self, name: str, module: nn.Module) -> list[Any]:
        opening = _Opening(self, name)
        return [
            module.register_forward_pre_hook(opening, with_kwargs=True),
            module.register_forward_hook(_Closing(opening), always_call=True),
        ]

    def enter(self, hook: object, name: str, module: nn.Module, given: Any) -> None:
        """A module's forward begins."""
        if not frames():  # another thread, or a forward that backward runs again
            return
        region = Region(self, name, None)
        begin(hook, region)
        enter(region)
        self._switch()
        self._count()
        if self._listener is not None:
            self._listener.entered(name, module, given)

    def leave(self, hook: object, name: str, result: Any) -> None:
        """A module's forward ends."""
        region = end(hook)
        if region is not None and leave(region):
            if self._listener is not None:
                self._listener.left(name, result)
            self._switch()

    def _switch(self) -> bool:
        path = self.path() or MODEL
        changed = not self.timeline.paths or self.timeline.paths[-1] != path
        self.timeline.switch(path)
        return changed

    def _count(self) -> None:
        path = self.path()
        self.calls[path] = self.calls.get(path, 0) + 1


class _Opening(Hook):
    """The hook before forward; does nothing inside a compiled graph."""

    def __init__(self, tracker: RegionTracker, name: str) -> None:
        self.tracker, self.name = tracker, name

    @hidden
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.tracker.enter(self, self.name, module, (args, kwargs))


class _Closing(Hook):
    """The hook after forward."""

    def __init__(self, opening: _Opening) -> None:
        self.opening = opening

    @hidden
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.opening.tracker.leave(self.opening, self.opening.name, output)


def watched(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules to hook, by the names that a keeper has for them: not the model itself, nor what is inside a
    compiled module."""
    compiled = [""] if is_compiled(model) else []
    for name, module in named_modules(model).items():
        inside = any(name.startswith(prefix) for prefix in compiled)
        if is_compiled(module):
            compiled.append(f"{name}.")
        if not inside:
            yield name, module
