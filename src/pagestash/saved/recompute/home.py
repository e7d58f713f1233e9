"""The `recompute` home of one keeper: what was recomputed waits in it until backward asks for it.

A region under recompute keeps its inputs and discards what it saved (`recorded_forward.py`). Its output is
discarded, too: where a later region saves it, the place of that entry is an `Output`, and no home holds its bytes.
"""

from threading import RLock
from typing import NamedTuple
from weakref import WeakSet, ref

import torch

from pagestash.policy import HomeName
from pagestash.saved.home import Home, give_up
from pagestash.saved.recompute.chain import discards
from pagestash.saved.recompute.packed import Output
from pagestash.saved.recompute.recipe import Learned, Recipe
from pagestash.saved.recompute.recomputed import Recomputed
from pagestash.saved.recompute.value_checks import Checks
from pagestash.saved.storage import Entry, plain_storage
from pagestash.torch_internals import StorageWeakRef


class _KnownOutput(NamedTuple):
    storage: StorageWeakRef
    version: int
    output: Output


class Recompute(Home):
    """Holds what was recomputed and is still to be asked for, and counts that."""

    name: HomeName = "recompute"

    def __init__(self, *, check: bool = False) -> None:
        """`check`: compare the values of every forward, not of the first step's alone."""
        super().__init__()
        self.learned = Learned()
        self.checks = Checks(always=check)
        self.lock = RLock()
        self.replayed: WeakSet[Recomputed] = WeakSet()
        self._held: dict[tuple[str, int], list[int]] = {}
        """By region and storage: its bytes, and how many tensors in it wait."""
        self._of_step: list[Entry] = []
        self._recipes: list[ref[Recipe]] = []
        """Of this step's forwards."""
        self.known: dict[int, _KnownOutput] = {}
        """Outputs that can be recomputed, by their storage."""

    # --- outputs that can be recomputed ---

    def remember(self, key: int, tensor: torch.Tensor, output: Output) -> None:
        """From here on, `tensor` can be recomputed wherever it is saved."""
        self.prune()
        self.known[key] = _KnownOutput(StorageWeakRef(tensor.untyped_storage()), tensor._version, output)
        output.recomputed.output_keys.append(key)

    def output_of(self, key: int, tensor: torch.Tensor, *, chained: bool) -> Output | None:
        """The output that the tensor is a view of; None if it is none that can be recomputed.

        `chained`: asked by a region that will itself be recomputed.
        """
        known = self.known.get(key)
        if known is None or known.storage.expired() or known.version != tensor._version:
            return None
        replay_bytes = known.output.recomputed.replay_bytes
        if chained and not discards(replay_bytes, tensor.untyped_storage().nbytes()):
            return None
        return known.output

    def note_entry(self, entry: Entry) -> None:
        """An entry that stands for an output was made in this step."""
        self._of_step.append(entry)

    def note_recipe(self, recipe: Recipe) -> None:
        """A forward of this step is recorded."""
        self._recipes.append(ref(recipe))

    def prune(self) -> None:
        """Let go of forwards whose outputs are gone: no operation can save them any more."""
        if not self.known:
            return
        # (A copy: another thread's part of backward may forget outputs meanwhile.)
        gone = [key for key, known in self.known.copy().items() if known.storage.expired()]
        for key in gone:
            self.known.pop(key, None)

    def forget_outputs(self, recomputed: Recomputed) -> None:
        """From here on, outputs of that forward are saved like any other tensor."""
        for key in recomputed.output_keys:
            known = self.known.get(key)
            if known is not None and known.output.recomputed is recomputed:
                self.known.pop(key, None)

    def settle(self) -> None:
        """The step is over: outputs that are alive now belong to the caller."""
        self._of_step = []
        for known in self._recipes:
            recipe = known()
            if recipe is not None:
                recipe.step_over()
        self._recipes = []
        self.known.clear()
        self.checks.step_over()

    def commit(self) -> None:
        self.checks.raise_found()

    def give_up(self) -> None:
        """The step ended by an exception: nobody will ask for what was recomputed."""
        self.checks.give_up()
        give_up(self._of_step)
        for recomputed in list(self.replayed):
            recomputed.let_go()

    # --- what waits, in bytes: a storage once for each region ---

    def hold(self, region: str, tensor: torch.Tensor) -> None:
        key = plain_storage(tensor)
        if key is not None:
            held = self._held.get((region, key))
            if held is not None:
                held[1] += 1
                return
            size = tensor.untyped_storage().nbytes()
            self._held[region, key] = [size, 1]
            self.tally.count(region, size)

    def release(self, region: str, tensor: torch.Tensor) -> None:
        key = plain_storage(tensor)
        if key is not None:
            held = self._held[region, key]
            held[1] -= 1
            if not held[1]:
                del self._held[region, key]
                self.tally.count(region, -held[0])
