"""Uninitialised memory that shows: every `torch.empty` of whatever kind is filled with NaN, integers with their
largest value and bools with True. Code that reads what it has not written then fails every time, and not by chance.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def filled_with_nan() -> Iterator[None]:
    """Torch's own switch, which works only beside deterministic algorithms; both are put back at the end."""
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    # Only a warning where an operation has no deterministic form: the fill alone is wanted.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = was_filling
        torch.use_deterministic_algorithms(was_on, warn_only=was_warning)
