"""What was done to a model, why the rest was not, and the way back."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from types import FunctionType, MethodType
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Replaced:
    """A part of a model that runs code of ours now."""

    part: str
    """`experts`, `router`, `lora`, `norm`, `rope`, `attention`, `masks` or `head`."""
    name: str
    kind: str
    """The class of the module."""
    by: str


@dataclass(frozen=True, slots=True)
class Left:
    """A part of a model that runs as before, and why."""

    part: str
    name: str
    kind: str
    why: str


class Ran:
    """Whether a piece of code of ours ran so far; it sets `yes` itself."""

    yes = False

    def __call__(self) -> bool:
        return self.yes


MARK = "_pagestash_forward"
"""The attribute of a module that has a `forward` of ours, wherever others have put it since."""


class _Mark:
    """Copied with the module, whose `forward` goes with it. A file could not hold that `forward`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Mark":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model that pagestash.hf.optimize has changed cannot be pickled: save its state_dict "
            "(model.save_pretrained does), or call report.undo() first"
        )


@dataclass(slots=True)
class Report:
    """What `optimize` replaced and what it left alone; `undo()` puts everything back."""

    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _ran: list[Callable[[], bool | None]] = field(default_factory=list, repr=False)
    """Of each entry of `replaced`, whether it did; None of what nobody counts."""

    def replace(
        self, part: str, name: str, module: nn.Module, by: str, ran: Callable[[], bool] | None = None
    ) -> None:
        """Note that `module` runs `by` now; `ran` says whether it did, else the `forward` that we put there."""
        self.replaced.append(Replaced(part, name, type(module).__name__, by))
        self._ran.append(ran or partial(_called, module))

    def never_called(self) -> list[Replaced]:
        """What has not run so far: in a tower for images without any, say, or a fused head without labels."""
        return [entry for entry, ran in zip(self.replaced, self._ran) if ran() is False]

    def put_forward(self, module: nn.Module, ours: Callable[..., Any]) -> None:
        """Let `module` run `ours(module, ...)` until `undo`.

        Others may wrap it later: accelerate for mixed precision, TRL for its loss. `undo` leaves their wrapper
        where it is; what is inside it does from then on what the module's class does.
        """
        put: Any = module
        forward, off = _with_switch(ours)
        put.forward = MethodType(forward, module)
        module.__dict__[MARK] = _Mark()

        def take_off() -> None:
            del module.__dict__[MARK]
            if getattr(module.__dict__.get("forward"), "__func__", None) is forward:
                del module.__dict__["forward"]
            else:
                off()

        self._undo.append(take_off)

    def on_undo(self, put_back: Callable[[], None]) -> None:
        """Let `put_back()` be a part of `undo`."""
        self._undo.append(put_back)

    def leave(self, part: str, name: str, module: nn.Module, why: str) -> None:
        """Note that `module` runs as before."""
        self.left.append(Left(part, name, type(module).__name__, why))

    def undo(self) -> None:
        """Put everything back as it was before. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        idle = self.never_called()
        if not any(ran() for ran in self._ran):  # before the first step
            idle = []
        used = (each for each in self.replaced if each not in idle)
        lines = ["replaced:", *_counted((each.part, each.kind, each.by) for each in used)]
        if idle:
            lines += ["replaced, and never called so far:"]
            lines += _counted((each.part, each.kind, each.by) for each in idle)
        if self.left:
            lines += ["left alone:", *_counted((each.part, each.kind, each.why) for each in self.left)]
        return "\n".join(lines)


def _called(module: nn.Module) -> bool | None:
    """Whether the `forward` that we put there was called; None: there is none."""
    called = getattr(module.__dict__.get("forward"), "called", None)
    return None if called is None else called()


def _with_switch(ours: Callable[..., Any]) -> tuple[FunctionType, Callable[[], None]]:
    """`ours` as a function of its own, and what makes it the `forward` of the module's class."""
    runs, called = ours, False

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal called
        called = True
        return runs(self, *args, **options)

    def off() -> None:
        nonlocal runs
        runs = lambda self, *args, **options: type(self).forward(self, *args, **options)  # noqa: E731

    # A code object of its own: a compiler keeps what it compiled by code object, and only a few forms of it.
    own = FunctionType(
        forward.__code__.replace(), forward.__globals__, forward.__name__, None, forward.__closure__
    )
    update_wrapper(own, ours)
    own.called = lambda: called  # type: ignore[attr-defined]
    return own, off


def _counted(entries: Iterable[tuple[str, str, str]]) -> list[str]:
    found = Counter(entries)
    lines = [f"  {part:<10}{count:>2} × {kind}: {text}" for (part, kind, text), count in found.items()]
    return lines or ["  nothing"]


PATCHERS = {
    "liger_kernel": "Liger has replaced its forward",
    "trl": "TRL has replaced its forward, and takes the loss by chunks itself",
    "accelerate": "accelerate has wrapped its forward; call optimize(model) before the model is prepared, "
    "or divided among devices by a device_map",
}
"""What is said of a `forward` that stands on an instance, by the package that put it there."""


def patched_already(module: nn.Module) -> str | None:
    """Whose `forward` runs in the place of the one that the class came with; None: nobody's."""
    kind: Any = type(module)
    if is_liger(kind):
        return "Liger has replaced its class"
    forward = module.__dict__.get("forward")
    if forward is None:
        return "Liger has replaced its class's forward" if packages(kind.forward) & {"liger_kernel"} else None
    found = packages(forward)
    if MARK in module.__dict__ and "liger_kernel" not in found:
        return "optimised already"
    said = (text for package, text in PATCHERS.items() if package in found)
    return next(said, "another library has replaced its forward")


def is_liger(kind: Any) -> bool:
    """Whether a class or a function is one of Liger's."""
    return (kind.__module__ or "").startswith("liger_kernel.")


def packages(forward: Any) -> set[str]:
    """Where a function was written: what it says of itself, which a decorator may have copied, and what is true."""
    function = getattr(forward, "__func__", getattr(forward, "func", forward))  # of a method, of a partial
    modules = getattr(function, "__module__", None), getattr(function, "__globals__", {}).get("__name__")
    return {name.partition(".")[0] for name in modules if name}
