"""What it takes to repeat one forward of a region: its inputs, all else that it reads, and what it saved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pagestash.saved.hooks import SavedTensorHooks
from pagestash.saved.packed import Packed
from pagestash.saved.recompute.buffers import Buffers, ChangesBuffers
from pagestash.saved.recompute.modes import Modes
from pagestash.saved.recompute.objects import ArgumentObjects
from pagestash.saved.recompute.references import References
from pagestash.saved.recompute.rng import PythonRngStates, Random, own_generator
from pagestash.saved.recompute.trees import map_leaves
from pagestash.saved.recompute.undo import Undo
from pagestash.saved.recompute.value_checks import Checks
from pagestash.saved.recompute.weights import Weights


@dataclass(slots=True, eq=False)
class Learned:
    """What earlier forwards of a keeper's modules have shown."""

    changes_buffers: ChangesBuffers = field(default_factory=WeakKeyDictionary)
    python_rng: PythonRngStates = field(default_factory=PythonRngStates)


class ReplayInput:
    """A tensor held for a replay: an input, or a result of `once`. (No dataclass: those are looked into.)"""

    __slots__ = ("packed", "requires_grad", "summary")

    def __init__(self, packed: Packed, requires_grad: bool, summary: torch.Tensor | None) -> None:
        self.packed, self.requires_grad, self.summary = packed, requires_grad, summary


class OnceResult(NamedTuple):
    """What a call of `once` returned, the states of generators that it drew from, and what sets its attributes."""

    value: Any
    random: Random
    attributes: Sequence[Callable[[], None]] = ()


Form = tuple[torch.Size | None, torch.dtype]
Layout = tuple[object, ...]


def form_of(tensor: torch.Tensor) -> Form:
    """Shape and dtype, which must be the same in a replay."""
    try:
        return tensor.shape, tensor.dtype
    except RuntimeError:  # a nested tensor has no shape
        return None, tensor.dtype


def layout_of(tensor: torch.Tensor, storage_bytes: int) -> Layout:
    """Where a tensor lies in its storage, and that one's size."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), storage_bytes


class Recipe:
    """Begun before a forward, completed by it, read by each replay."""

    def __init__(
        self,
        name: str,
        path: Sequence[nn.Module],
        modules: Sequence[nn.Module],
        hooks: SavedTensorHooks,
        checks: Checks,
        learned: Learned,
    ) -> None:
        """Of a forward of the last module of `path`, which leads there from the model.

        `modules`: that module, and all in it.
        """
        self.name = name
        self.path = path
        self.module = path[-1]
        self.modules = modules
        self.hooks = hooks
        self.device = hooks.device_here
        self.checked = checks.due(self.module)
        """Whether recomputed values are compared with those of this forward."""
        self.complete = False
        """Whether the forward is over."""
        self.inputs: Any = None
        """Its arguments, each tensor of them a `ReplayInput`."""
        self.once_results: list[OnceResult] = []
        self.saved: list[Form] = []
        """Of each tensor that an operation saved, in order."""
        self.summaries: dict[int, torch.Tensor] = {}
        """Of the values of saved tensors, by their number, until they were compared."""
        self.layouts: dict[int, Layout] = {}
        """Of outputs, by their number."""
        self.weights = Weights(modules, name, checks)
        self._checks = checks
        self._references: References | None = References(modules)
        """Before forward; None: the step is over."""
        self._buffers = Buffers(modules, name, learned.changes_buffers, checks)
        self._modes = Modes(self.device)
        self._random = Random(self.device, learned.python_rng)
        self._objects: ArgumentObjects | None = None
        """Objects among its arguments, where there are any."""

    def takes_object(self, leaf: Any) -> None:
        """One of its arguments is an object that a forward could change."""
        if self._objects is None:
            self._objects = ArgumentObjects(self.name)
        self._objects.add(leaf)

    def close(self) -> None:
        """The forward is over: refuse if it has changed what a replay must find unchanged."""
        if self.checked:
            self._refuse_generators()
        self._random.keep_drawn()
        self._buffers.close()
        self.weights.close()
        if self._objects is not None:
            self._objects.check(forward=True)
        self.complete = True

    def _refuse_generators(self) -> None:
        for module in self.modules:
            name = own_generator(module)
            if name is not None:
                raise RuntimeError(
                    f"region {self.name!r} is under recompute, and {type(module).__name__} has a generator in "
                    f"its attribute {name!r}, from which a replay would draw other numbers; draw from the global "
                    "generator of torch, Python or NumPy, or give the region another home"
                )

    def step_over(self) -> None:
        """Attributes may have a graph, which holds what its regions hold."""
        self._references = None
        self.once_results = []

    def check(self) -> None:
        """Refuse a replay if anything that forward read was changed since."""
        if self._references is None:
            raise RuntimeError(
                f"region {self.name!r} is under recompute, and its backward comes after the step of its forward: "
                "what it found is not held any more. Run backward inside of the step, or give it another home"
            )
        if self._objects is not None:
            self._objects.check()
        self._references.check(self.name)
        self.weights.check()
        self._buffers.check()

    def restore(self, undo: Undo) -> None:
        """All that the forward read is as it was before it; `undo`: what changes from here on."""
        assert self._references is not None
        self._references.restore(undo)
        self._buffers.put_copies()
        self.weights.restore(undo)
        self._random.restore(undo)
        self._modes.restore(undo)

    def bring_back(self, tree: Any) -> Any:
        """`tree` with tensors in place of what was held, without a graph."""
        found: dict[ReplayInput, torch.Tensor] = {}

        def bring(leaf: Any) -> Any:
            if not isinstance(leaf, ReplayInput):
                return leaf
            if leaf in found:
                return found[leaf]
            if leaf.packed.changed():
                raise RuntimeError(self._input_changed())
            tensor = leaf.packed.unpack().detach()
            summary, leaf.summary = leaf.summary, None
            if summary is not None:
                self.compare(summary, tensor, self._input_changed())
            found[leaf] = tensor.requires_grad_(leaf.requires_grad)
            return tensor

        return map_leaves(bring, tree, ReplayInput)

    def compare(self, summary: torch.Tensor, tensor: torch.Tensor, differs: str) -> None:
        """Raise `differs` if `tensor` has other values than the one that `summary` is of."""
        self._checks.compare(summary, tensor, differs)

    def _input_changed(self) -> str:
        return (
            f"region {self.name!r} is under recompute, and a tensor that it took in was changed in place before "
            "backward, so that its forward cannot be replayed; clone it before changing it, or give the region "
            "another home"
        )
