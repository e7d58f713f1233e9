"""How far property tests look whose examples take seconds: few in ordinary runs, more in `make test-all`."""

import os

from hypothesis import settings

LONG = "LONG_SWEEPS" in os.environ


def examples(few: int, many: int) -> settings:
    """The same few examples every time; in long runs `many`, at random."""
    return settings(max_examples=many if LONG else few, deadline=None, derandomize=not LONG)
