"""Which saved tensors of a step a keeper sees: all of them, or only where something may move.

Each tensor that the hooks see costs an eager step 10 to 20 µs, and most of them stay where they are. In a step that
is like earlier ones (`steady.py`) the hooks are therefore open only

- in regions whose rule moves tensors, and in fused operations that save for such a region;
- after a recomputed region, until its outputs were saved outside of such regions as often as in the earlier steps.

What they do not see, autograd holds as it does without a keeper. A tensor that would move, but stayed because an
operation that is not seen now had saved its storage before, stays again: it is known by its place in the order of
saving. So a step that goes another way than expected may hold more memory; its values are the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from pagestash.policy import Rule
from pagestash.saved.packed import unpack
from pagestash.torch_internals import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)

_ALWAYS = 1 << 30
"""Saves to wait for, where no earlier step has shown how many there are."""


def moves(rule: Rule | None) -> bool:
    """Whether tensors under this rule may leave their storage, or be recomputed."""
    return rule is not None and (rule.home != "keep" or rule.bits is not None)


class Learned(NamedTuple):
    """What a step that was seen as a whole says about those that are like it."""

    outputs: tuple[int, ...]
    """How often outputs of each recorded forward, in their order, were saved where nothing moves."""
    stays: frozenset[int]
    """Of the tensors that may move, in their order, those that stayed because they were saved elsewhere before."""


NOTHING = Learned((), frozenset())


class Watch:
    """Opens and closes the hooks of one keeper in a step."""

    def __init__(self) -> None:
        self.inside = 0
        """Open regions in which tensors may move."""
        self.depends = False
        """Whether what moved in this step depended on more than `Learned` says of what was saved elsewhere."""
        self.narrow = False
        """Whether the hooks are open only where something may move."""
        self._hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        """In a step."""
        self._open = False
        self._learned = NOTHING
        self._saves: dict[int, int] = {}
        """How often outputs of each recorded forward were saved outside, where all of a step is seen."""
        self._stays: set[int] = set()
        self._asked = 0
        """Tensors that may move, so far."""
        self._still = 0
        """Such saves that are still to come, where not all is seen."""

    # --- a step ---

    def begin(self, pack: Callable[..., Any]) -> None:
        """A step begins, and all of it is seen."""
        self.inside = self._asked = self._still = 0
        self.depends = self.narrow = False
        self._saves, self._stays = {}, set()
        self._hooks = pack, unpack
        push_saved_tensors_hooks(*self._hooks)  # refused where the caller has disabled hooks
        self._open = True

    def end(self) -> None:
        """The step is over; also after an error in `begin`."""
        if self.on_top if self.narrow else self._open:
            pop_saved_tensors_hooks()
        self._open, self._hooks = False, None

    @property
    def on_top(self) -> bool:
        """Whether the hooks are open, and nobody has opened others since."""
        return self._open and top_saved_tensors_hooks(True) == self._hooks

    def close(self) -> None:
        """See nothing of the rest of the step."""
        pop_saved_tensors_hooks()
        self._open = False

    def narrow_down(self, learned: Learned) -> None:
        """See the rest of the step only where something may move; it is like the one that says `learned`."""
        self.narrow, self._learned = True, learned
        self.close()

    @property
    def learned(self) -> Learned:
        """If all of the step was seen."""
        outputs = range(max(self._saves, default=-1) + 1)
        return Learned(tuple(self._saves.get(number, 0) for number in outputs), frozenset(self._stays))

    # --- where something may move ---

    def enter(self) -> None:
        self.inside += 1
        if self.narrow:
            self._see()

    def leave(self) -> None:
        self.inside -= 1
        if self.narrow:
            self._look_away()

    def stays(self, held_elsewhere: bool) -> bool:
        """Whether a tensor that may move stays, because its storage is held elsewhere; asked for each one."""
        number, self._asked = self._asked, self._asked + 1
        if self.narrow:
            return held_elsewhere or number in self._learned.stays
        if held_elsewhere:
            self._stays.add(number)
        return held_elsewhere

    def recorded(self, number: int) -> None:
        """A forward was recorded, and its outputs can be recomputed from here on."""
        if not self.narrow:
            self._saves.setdefault(number, 0)
            return
        outputs = self._learned.outputs
        self._still += outputs[number] if number < len(outputs) else _ALWAYS
        if self._still:
            self._see()

    def saved_output(self, number: int) -> None:
        """An output of a recorded forward was saved."""
        if self.inside:
            return
        if not self.narrow:
            self._saves[number] = self._saves.get(number, 0) + 1
        elif self._still:
            self._still -= 1
            self._look_away()

    def _see(self) -> None:
        # Whoever has opened hooks around, such as a checkpoint, gets all that is saved inside, as in every step.
        # (Not by `_open`: what was opened in a backward's node, autograd has closed when it returned.)
        if self._hooks is not None and top_saved_tensors_hooks(True) is None:
            push_saved_tensors_hooks(*self._hooks)
            self._open = True

    def _look_away(self) -> None:
        # (If others were opened since and are still there, ours stay below them until the next region ends.)
        if not self.inside and not self._still and self.on_top:
            self.close()
