"""What was done to a model, why the rest was not, and the way back."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Replaced:
    """A part of a model that runs code of ours now."""

    part: str
    """`experts`, `lora`, `norm`, `rope`, `attention` or `head`."""
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


def _remove_forward(module: nn.Module) -> None:
    """Take off a `forward` that stands on an instance: its class's holds again."""
    del module.__dict__["forward"]


@dataclass(slots=True)
class Report:
    """What `optimize` replaced and what it left alone; `undo()` puts everything back."""

    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    _undo: list[tuple[Callable[[Any], None], nn.Module]] = field(default_factory=list, repr=False)

    def replace(
        self,
        part: str,
        name: str,
        module: nn.Module,
        by: str,
        *others: nn.Module,
        undo: Callable[[Any], None] = _remove_forward,
    ) -> None:
        """Note that `module` runs `by` now, and that `undo` puts it and `others` back."""
        self.note(part, name, module, by)
        for each in (module, *others):
            self.on_undo(undo, each)

    def note(self, part: str, name: str, module: nn.Module, by: str) -> None:
        """Note that `module` runs `by` now."""
        self.replaced.append(Replaced(part, name, type(module).__name__, by))

    def on_undo(self, put_back: Callable[[Any], None], module: nn.Module) -> None:
        """Let `put_back(module)` be a part of `undo`."""
        self._undo.append((put_back, module))

    def leave(self, part: str, name: str, module: nn.Module, why: str) -> None:
        """Note that `module` runs as before."""
        self.left.append(Left(part, name, type(module).__name__, why))

    def undo(self) -> None:
        """Put everything back as it was before. A second call does nothing."""
        while self._undo:
            put_back, module = self._undo.pop()
            put_back(module)

    def __str__(self) -> str:
        lines = ["replaced:", *_counted((each.part, each.kind, each.by) for each in self.replaced)]
        if self.left:
            lines += ["left alone:", *_counted((each.part, each.kind, each.why) for each in self.left)]
        return "\n".join(lines)


def _counted(entries: Iterable[tuple[str, str, str]]) -> list[str]:
    found = Counter(entries)
    lines = [f"  {part:<10}{count:>2} × {kind}: {text}" for (part, kind, text), count in found.items()]
    return lines or ["  nothing"]


def patched_already(module: nn.Module) -> str | None:
    """Whose `forward` stands on the instance in the place of its class's; None: nobody's."""
    if _is_liger(type(module)):
        return "Liger has replaced its class"
    forward = module.__dict__.get("forward")
    if forward is None:
        return None
    function = getattr(forward, "__func__", forward)
    if getattr(function, "__module__", "").startswith("pagestash."):
        return "optimised already"
    if (getattr(function, "__module__", None) or "").startswith("liger_kernel"):
        return "Liger has replaced its forward"
    return "another library has replaced its forward"


def _is_liger(kind: type) -> bool:
    return kind.__module__.startswith("liger_kernel")
