"""Parameters that get new memory after their region was opened, as FSDP2 does it just before a module's forward.

A region knows the storages of its weights when it opens. A hook on every module inside notes those that come
later. Most models have none, and a hook makes every call of its module 5 µs slower. So a hook that found nothing
new in a step is taken off. It is put back when the region opens with other parameter storages than the last time.
That is in time: the modules inside have not run yet, and a parameter that is gathered later than its region opens
is in shards when it opens, which are in other storages than the whole of it.

Weights that something else puts into a module inside (`functional_call` from some step on) are found when all hooks
are put back, every `LOOK_AGAIN` steps. Until then they count as activations: more memory, and the same values.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pagestash.saved.compiled import hidden, hidden_here
from pagestash.saved.module_hook import Hook
from pagestash.saved.region import frames
from pagestash.saved.storage import storage_keys
from pagestash.torch_internals import parameters_of

LOOK_AGAIN = 16


class WeightNotes:
    """The hooks of one keeper that note weights."""

    def __init__(self) -> None:
        self.in_step = False
        self._of_modules: WeakKeyDictionary[nn.Module, NoteWeights] = WeakKeyDictionary()
        self._on: list[NoteWeights] = []
        self._steps = 0

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Note the weights of `modules` from here on. Once for each, however many regions it is in."""
        for module in modules:
            if any(value is not None for value in parameters_of(module).values()):
                note = self._of_modules.get(module)
                if note is None:
                    note = self._of_modules[module] = NoteWeights(self)
                self._put_on(module, note)
                note.found = False

    def _put_on(self, module: nn.Module, note: "NoteWeights") -> None:
        if note.handle is None:
            note.handle = module.register_forward_pre_hook(note)
            self._on.append(note)
        note.ran = False

    def step_over(self) -> None:
        """Take off the hooks of modules that ran, and had the weights that were known."""
        self.in_step = False
        for note in self._on:
            if note.ran and not note.found:
                note.take_off()
        self._on = [note for note in self._on if note.handle is not None]
        self._steps += 1
        if self._steps % LOOK_AGAIN == 0:
            for module, note in self._of_modules.items():
                self._put_on(module, note)

    def remove(self) -> None:
        """Take all hooks off."""
        for note in self._on:
            note.take_off()
        self._on.clear()
        self._of_modules.clear()


class NoteWeights(Hook):
    """Before the forward of a module inside a region: note what weights it has now, for the innermost region."""

    def __init__(self, notes: WeightNotes) -> None:
        self.handle: Any = None
        """While it is on its module."""
        self.ran = False
        """Whether it has looked since it was put there."""
        self.found = False
        """Whether it ever found a weight that the region did not know."""
        self._notes = notes

    def take_off(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    @hidden_here
    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.note(module)

    @hidden
    def note(self, module: nn.Module) -> None:
        current = frames()
        if not self._notes.in_step or not current:
            return
        region = current[-1]
        if region.run is not None and region.run.replays:
            return  # what a replay saves is counted, and no weight told apart
        new = storage_keys(parameters_of(module).values()) - region.owner.weights
        self.ran = True
        if not new <= region.weights:
            self.found = True
            region.weights |= new
