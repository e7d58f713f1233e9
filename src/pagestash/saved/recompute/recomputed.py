"""The tensors that one forward discarded: a replay brings them back when backward asks for the first."""

from threading import RLock
from typing import Protocol
from weakref import WeakSet

import torch

from pagestash.saved.recompute.recipe import Recipe
from pagestash.saved.recompute.replay import Replay
from pagestash.saved.storage import Entry
from pagestash.saved.streams import current_stream


class ReplayHome(Protocol):
    """Counts what was recomputed and waits to be asked for, in all regions: the home."""

    lock: RLock
    """Held during a replay: autograd has a thread for each device."""
    replayed: "WeakSet[Recomputed]"

    def hold(self, region: str, tensor: torch.Tensor) -> None: ...

    def release(self, region: str, tensor: torch.Tensor) -> None: ...

    def prune(self) -> None: ...

    def forget_outputs(self, recomputed: "Recomputed") -> None: ...

    def note_entry(self, entry: Entry) -> None: ...


class Recomputed:
    """What waits for a replay of one forward, and what replays have brought back and backward has not asked for.

    A saved tensor has a number, its place in the order of saving; so has an output.
    """

    def __init__(self, recipe: Recipe, home: ReplayHome) -> None:
        self.recipe = recipe
        self.replay_bytes = 0
        """Bytes that a replay brings back, with those of the replays that it needs for its inputs."""
        self.moves = False
        """Whether a replay needs inputs that have moved: they come back on the stream of who asks."""
        self.entries: dict[int, Entry] = {}
        """Of outputs that a later region saved."""
        self.output_keys: list[int] = []
        """Storages of outputs, under which the home knows this forward."""
        self._home = home
        self._wanted: set[int] = set()
        self._tensors: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None  # of the last replay
        self._replayed = False

    def want(self, number: int) -> None:
        """The tensor saved under `number` was discarded, and backward may ask for it."""
        self._wanted.add(number)

    def want_output(self, number: int, entry: Entry) -> None:
        """A later region saved the output, and `entry` stands for it."""
        self.entries[number] = entry
        self._home.note_entry(entry)

    def take(self, number: int) -> torch.Tensor:
        """The tensor saved under `number`. Whoever asks a second time causes a second replay."""
        with self._home.lock:
            if number not in self._tensors:
                self._replay()
            tensor = self._tensors.pop(number)
        self._home.release(self.recipe.name, tensor)
        return self._in_order(tensor)

    def take_output(self, number: int, last: bool) -> torch.Tensor:
        """An output; it waits here until the `last` of those who saved it has asked."""
        with self._home.lock:
            if number not in self._outputs:
                self._replay(number)
            tensor = self._outputs[number]
            if last:
                del self._outputs[number]
                self._home.release(self.recipe.name, tensor)
        return self._in_order(tensor)

    def forget(self, number: int) -> None:
        """Nothing can ask for that tensor any more."""
        self._wanted.discard(number)
        tensor = self._tensors.pop(number, None)
        if tensor is not None:
            self._home.release(self.recipe.name, tensor)
        self._let_go_of_inputs()

    def forget_output(self, number: int) -> None:
        """Nothing can ask for that output any more."""
        self.entries.pop(number, None)
        tensor = self._outputs.pop(number, None)
        if tensor is not None:
            self._home.release(self.recipe.name, tensor)
        self._let_go_of_inputs()

    def _let_go_of_inputs(self) -> None:
        """If backward has been here and nobody can ask again, the home need not know this forward any more.

        Its output may live on: a pipeline schedule holds that of a stage until its backward is over, and that of
        the last stage to the end of the step. While the home knows a forward, its input is held, which is the
        output of the forward before, and so on to the first. An operation that saves such an output later keeps it.
        """
        if self._replayed and not self._wanted and not self.entries:
            self._home.forget_outputs(self)

    def let_go(self) -> None:
        """Let go of what was recomputed; whoever asks for it causes a replay."""
        for tensors in (self._tensors, self._outputs):
            while tensors:
                self._home.release(self.recipe.name, tensors.popitem()[1])

    def _replay(self, output: int | None = None) -> None:
        recipe = self.recipe
        if not recipe.complete:
            raise RuntimeError(
                f"region {recipe.name!r} is under recompute, and takes gradients inside its own forward, which "
                "needs what it has just discarded; give it another home"
            )
        self._home.prune()  # the inputs of forwards that are done go before the replay takes memory
        self.let_go()  # the replay brings these back, too
        self._home.replayed.add(self)
        self._replayed = True
        outputs: set[int] = set()
        if output is not None:  # forward runs to its end then, where the other outputs are, too
            outputs = {output} | {number for number, entry in self.entries.items() if entry.waiting}
        replay = Replay(recipe, set(self._wanted), outputs)
        replay.run()
        self._tensors.update(replay.found)
        self._outputs.update(replay.outputs)
        for tensor in (*replay.found.values(), *replay.outputs.values()):
            self._home.hold(recipe.name, tensor)
        # Another thread may have ended its part of backward meanwhile, and found nothing to forget.
        for number in replay.found.keys() - self._wanted:
            self.forget(number)
        self._stream = current_stream() if recipe.device.type == "cuda" else None

    def _in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """The replay may have run on another stream than that of the operation that asks now."""
        if self._stream is not None and tensor.is_cuda:
            here = current_stream()
            if here != self._stream:
                here.wait_stream(self._stream)
                tensor.record_stream(here)
        return tensor
