"""What a step that ended by an exception leaves behind: its tensors are given up at once.

Autograd holds on to a failed graph until the thread runs its next backward. If the graph's tensors kept their pages
and their host memory until then, the next step would find none.
"""

from collections.abc import Iterable

import torch

from pagestash.saved.storage import Entry


class Lost:
    """The place of entries that were given up."""

    def get(self, entry: Entry) -> torch.Tensor:
        raise RuntimeError(
            f"backward asks for a tensor of region {entry.region!r} whose step ended by an exception, which gave "
            "up all that the step had saved; run forward again"
        )

    def drop(self, entry: Entry) -> None:
        """Its home has let go of it already."""


def give_up(entries: Iterable[Entry]) -> None:
    """Take the entries out of their places; whoever asks for one is told."""
    lost = Lost()
    for entry in entries:
        if entry.handles:
            # (Taken out first: its last handle may die before the place has begun to drop it.)
            place, entry.place = entry.place, lost
            if place is not None:
                place.drop(entry)
            entry.place, entry.origin = lost, None
