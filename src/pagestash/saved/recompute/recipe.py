"""What it takes to repeat one forward of a region: its inputs, all else that it reads, and what it saved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pagestash.saved.hooks import SavedTensorHooks
from pagestash.saved.packed import Packed
from pagestash.saved.recompute.argument_objects import ArgumentObjects
from pagestash.saved.recompute.attributes import Attributes
from pagestash.saved.recompute.rng import PythonRng, PythonRngStates, TorchRng
from pagestash.saved.recompute.rng_and_buffers import ChangesBuffers, RngAndBuffers
from pagestash.saved.recompute.trees import map_leaves
from pagestash.saved.recompute.value_checks import Checks
from pagestash.saved.recompute.weights import VersionOnly, Weights
from pagestash.saved.storage import byte_range, is_nested


@dataclass(slots=True, eq=False)
class Learned:
    """What earlier forwards of a keeper's modules have shown."""

    changes_buffers: ChangesBuffers = field(default_factory=WeakKeyDictionary)
    version_only: VersionOnly = field(default_factory=WeakKeyDictionary)
    python_rng: PythonRngStates = field(default_factory=PythonRngStates)


class ReplayInput:
    """A tensor held for a replay: an input, or a result of `once`. (No dataclass: those are looked into.)"""

    __slots__ = ("packed", "requires_grad", "summary")

    def __init__(self, packed: Packed, requires_grad: bool, summary: torch.Tensor | None) -> None:
        self.packed, self.requires_grad, self.summary = packed, requires_grad, summary


class OnceResult(NamedTuple):
    """What a call of `once` returned, the RNG states after it where it drew, and the attributes that it set."""

    value: Any
    torch_rng: TorchRng | None
    python_rng: PythonRng | None
    attributes: Sequence[Callable[[], None]] = ()


class Layout(NamedTuple):
    """Where a tensor lies in its storage, and the storage's size."""

    first: int
    end: int
    storage_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        return _layout((*byte_range(tensor), tensor.untyped_storage().nbytes()))


def form_of(tensor: torch.Tensor) -> tuple[torch.Size | None, torch.dtype]:
    """What must be the same in a replay. A nested tensor has no shape."""
    return None if is_nested(tensor) else tensor.shape, tensor.dtype


_layout: Callable[[tuple[int, int, int]], Layout] = partial(tuple.__new__, Layout)
"""Makes one of its fields, in a third of the time."""


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
        self.hooks = hooks
        self.device = hooks.device_here
        self.checked = checks.due(self.module)
        """Whether recomputed values are compared with those of this forward."""
        self.complete = False
        """Whether the forward is over."""
        self.inputs: Any = None
        """Its arguments, each tensor of them a `ReplayInput`."""
        self.once_results: list[OnceResult] = []
        self.saved: list[tuple[torch.Size | None, torch.dtype]] = []
        """Shape and dtype of each tensor that an operation saved, in order."""
        self.summaries: dict[int, torch.Tensor] = {}
        """Of the values of saved tensors, by their number, until they were compared."""
        self.layouts: dict[int, Layout] = {}
        """Of outputs, by their number."""
        self._objects: ArgumentObjects | None = None
        """Objects among its arguments, where there are any."""
        self.weights = Weights(modules, name, learned.version_only)
        self._checks = checks
        self.attributes: Attributes | None = Attributes(modules)
        """Before forward; None: the step is over."""
        self.rng_and_buffers = RngAndBuffers(
            modules,
            name,
            self.device,
            learned.changes_buffers,
            learned.python_rng,
            checks,
            search=self.checked,
        )

    def takes_object(self, leaf: Any) -> None:
        """One of its arguments is an object that a forward could change."""
        if self._objects is None:
            self._objects = ArgumentObjects(self.name)
        self._objects.add(leaf)

    def close(self) -> None:
        """The forward is over: refuse if it has changed what a replay must find unchanged."""
        self.rng_and_buffers.close()
        self.weights.close()
        if self._objects is not None:
            self._objects.close()
        self.complete = True

    def step_over(self) -> None:
        """Attributes may have a graph, which holds what its regions hold."""
        self.attributes = None
        self.once_results = []

    def check(self) -> Sequence[nn.Module]:
        """Refuse a replay if anything that forward read was changed since. Returns the modules that are there."""
        if self.attributes is None:
            raise RuntimeError(
                f"region {self.name!r} is under recompute, and its backward comes after the step of its forward: "
                "what it found is not held any more. Run backward inside of the step, or give it another home"
            )
        if self._objects is not None:
            self._objects.check()
        modules = self.weights.check()
        self.rng_and_buffers.check()
        return modules

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
