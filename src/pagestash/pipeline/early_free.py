"""`early_free`, which frees nothing any more: what it was for needs no call."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True, eq=False)
class Release:
    """The result of `early_free`: false, as nothing was freed."""

    work: Any = None
    reason: str = "early_free does nothing any more"
    freed: bool = False

    def __bool__(self) -> bool:
        return self.freed

    def wait(self) -> "Release":
        """Wait for the collective that was given."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self


def early_free(tensor: torch.Tensor, *, after: Any = None, sent: bool = False) -> Release:
    """Deprecated: it frees nothing. Let go of the tensor when the collective that reads it is over.

    The dispatches of `pagestash.moe` do so by themselves.
    """
    warnings.warn(
        "pagestash.pipeline.early_free frees nothing any more and will be removed: delete your reference to the "
        "tensor when its collective is over. The dispatches of pagestash.moe do that by themselves",
        DeprecationWarning,
        stacklevel=2,
    )
    return Release(after)
