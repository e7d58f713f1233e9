"""Which saved tensors of a step a keeper sees: all of them, or only where something may move.

Each tensor that the hooks see costs the host about 10 µs in an eager step, and most stay where they are. In a step
that is like earlier ones (`steady.py`) the hooks are therefore open only

- in regions whose rule moves tensors, and in fused operations that save for such a region;
- after a recomputed region, until its outputs were saved outside of such regions as often as in the earlier steps.

What they do not see, autograd holds as it does without a keeper. A tensor that would move, but stayed because an
operation that is not seen now had saved its storage before, stays again: it is known by its place in the region's
order of saving. So a step that goes another way than expected may hold more memory; its values are the same.
"""

from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple

from pagestash.saved.packed import unpack
from pagestash.torch_internals import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)

Place = tuple[str, int]
"""A region, and how many of a kind it had before in this step."""
_ALWAYS = 1 << 30
"""Saves to wait for, where no earlier step has shown how many there are."""


class Learned(NamedTuple):
    """What a step that was seen as a whole says about those that are like it."""

    outputs: dict[Place, int]
    """How often the outputs of each recorded forward were saved where nothing moves."""
    stays: frozenset[Place]
    """Tensors that may move, and stayed because they were saved elsewhere before."""


class Watch:
    """Opens and closes the hooks of one keeper in a step."""

    def __init__(self) -> None:
        self.inside = 0
        """Open regions in which tensors may move."""
        self.narrow = False
        """Whether the hooks are open only where something may move."""
        self.depends = False
        """Whether what moved in this step depended on more than `Learned` says of what was saved elsewhere."""
        self._hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        """In a step."""
        self._thread = 0
        """In which it runs. Hooks belong to a thread, and others that have its regions see nothing."""
        self._learned = Learned({}, frozenset())
        self._saves: dict[Place, int] = {}
        """How often the outputs of each recorded forward were saved where nothing moves, as far as was seen."""
        self._stays: set[Place] = set()
        self._asked: dict[str, int] = {}
        """By region: tensors that may move, so far."""
        self._still = 0
        """Saves of outputs that are still to come, where not all is seen."""

    # --- a step ---

    def begin(self, pack: Callable[..., Any]) -> None:
        """A step begins, and all of it is seen."""
        self.inside = self._still = 0
        self.depends = self.narrow = False
        self._saves, self._stays, self._asked = {}, set(), {}
        self._thread = get_ident()
        push_saved_tensors_hooks(pack, unpack)  # refused where the caller has disabled hooks
        self._hooks = pack, unpack

    def end(self) -> None:
        """The step is over; also after an error in `begin`."""
        if self._hooks is not None and (self.on_top or not self.narrow):
            pop_saved_tensors_hooks()
        self._hooks = None

    @property
    def on_top(self) -> bool:
        """Whether the hooks are open, and nobody has opened others since.

        Torch is asked each time: what is opened or closed in a backward's node, autograd undoes when it returns.
        """
        return self._hooks is not None and top_saved_tensors_hooks(True) == self._hooks

    def see_nothing(self) -> None:
        """For the rest of the step."""
        pop_saved_tensors_hooks()
        self._hooks = None

    def narrow_down(self, learned: Learned) -> None:
        """See the rest of the step only where something may move; it is like the one that says `learned`."""
        self.narrow, self._learned = True, learned
        self._still = sum(max(0, self._expected(place) - saves) for place, saves in self._saves.items())
        self._shut()

    @property
    def learned(self) -> Learned:
        """If all of the step was seen."""
        return Learned(dict(self._saves), frozenset(self._stays))

    # --- where something may move ---

    def enter(self) -> None:
        if get_ident() == self._thread:
            self.inside += 1
            if self.narrow:
                self._see()

    def leave(self) -> None:
        if get_ident() == self._thread:
            self.inside -= 1
            if self.narrow:
                self._shut()

    def stays(self, region: str, held_elsewhere: bool) -> bool:
        """Whether a tensor that may move stays, because its storage is held elsewhere; asked for each one."""
        number = self._asked.get(region, 0)
        self._asked[region] = number + 1
        if self.narrow:
            return held_elsewhere or (region, number) in self._learned.stays
        if held_elsewhere:
            self._stays.add((region, number))
        return held_elsewhere

    def recorded(self, place: Place) -> None:
        """A forward was recorded, and its outputs can be recomputed from here on."""
        if get_ident() != self._thread:
            return
        self._saves[place] = 0
        if self.narrow:
            self._still += self._expected(place)
            if self._still:
                self._see()

    def saved_output(self, place: Place) -> None:
        """An output of a recorded forward was saved."""
        if self.inside or place not in self._saves:
            return
        self._saves[place] += 1
        if self.narrow and self._still:
            self._still -= 1
            self._shut()

    def _expected(self, place: Place) -> int:
        return self._learned.outputs.get(place, _ALWAYS)

    def _see(self) -> None:
        # Whoever has opened hooks around, such as a checkpoint, gets all that is saved inside, as in every step.
        if self._hooks is not None and top_saved_tensors_hooks(True) is None:
            push_saved_tensors_hooks(*self._hooks)

    def _shut(self) -> None:
        # (If others were opened since and are still there, ours stay below them until the next region ends.)
        if not self.inside and self._still <= 0 and self.on_top:
            pop_saved_tensors_hooks()
