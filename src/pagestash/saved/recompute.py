"""The `recompute` home: what it holds is what was made again, until backward has asked for it.

A region under recompute keeps its inputs and drops what it saved (`run.py`). Its output is dropped, too: where
a later region saves it, the entry's home is this one, and its place is (run, number of the output).
"""

from threading import RLock
from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pagestash.policy import HomeName
from pagestash.saved.homes import Home
from pagestash.saved.lost import give_up
from pagestash.saved.run import Output, Run
from pagestash.saved.storage import Entry, plain_storage
from pagestash.saved.surroundings import Known
from pagestash.saved.values import Checks

LIGHT = 8
"""An output that another recomputed region takes in is dropped if making it again brings back at most this many
times its bytes. Its region's tensors then wait through the other one's backward: nothing for a norm or a
projection, but for a whole layer more than was saved, and for a chain of layers everything."""


class Recompute(Home):
    """Holds nothing but what was made again and is still to be asked for, and counts that."""

    name: HomeName = "recompute"

    def __init__(self) -> None:
        super().__init__()  # its tally is of what was recomputed and waits
        self._of_step: list[Entry] = []
        self.known = Known()
        self.checks = Checks()
        self.lock = RLock()
        """Held while a region is run again: autograd has a thread for each device."""
        self.making: WeakSet[Run] = WeakSet()
        """Regions that were run again."""
        self._held: dict[tuple[str, int], list[int]] = {}
        self._outputs: dict[int, tuple[StorageWeakRef, int, Run, int]] = {}

    # --- outputs that can be recomputed ---

    def remember(self, key: int, tensor: torch.Tensor, run: Run, number: int) -> None:
        self.prune()
        self._outputs[key] = (StorageWeakRef(tensor.untyped_storage()), tensor._version, run, number)

    def output_of(self, key: int, tensor: torch.Tensor, *, chained: bool) -> Output | None:
        """The output that the tensor is a view of; None if it is none that can be recomputed.

        `chained`: asked by a region that will itself be recomputed.
        """
        found = self._outputs.get(key)
        if found is None or found[0].expired() or found[1] != tensor._version:
            return None
        _, _, run, number = found
        if chained and run.weight > LIGHT * tensor.untyped_storage().nbytes():
            return None
        return Output(run, number)

    def note_entry(self, entry: Entry) -> None:
        """An entry that stands for an output was made in this step."""
        self._of_step.append(entry)

    def prune(self) -> None:
        """Let go of runs whose outputs are gone: nobody can save them any more."""
        gone = [key for key, (storage, *_) in self._outputs.items() if storage.expired()]
        for key in gone:
            del self._outputs[key]

    def settle(self) -> None:
        """The step is over: outputs that are alive now belong to the caller."""
        self._of_step = []
        self._outputs.clear()
        self.checks.step_over()

    def give_up(self) -> None:
        """The step ended by an exception: nobody will ask for what was recomputed."""
        give_up(self._of_step)
        for run in list(self.making):
            run.release_made()

    # --- counts ---

    def hold(self, region: str, tensor: torch.Tensor) -> None:
        key = plain_storage(tensor)
        if key is not None:
            held = self._held.setdefault((region, key), [tensor.untyped_storage().nbytes(), 0])
            held[1] += 1
            if held[1] == 1:
                self.tally.count(region, held[0])

    def release(self, region: str, tensor: torch.Tensor) -> None:
        key = plain_storage(tensor)
        if key is not None:
            held = self._held[region, key]
            held[1] -= 1
            if not held[1]:
                del self._held[region, key]
                self.tally.count(region, -held[0])
