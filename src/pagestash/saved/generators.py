"""Python's and NumPy's random numbers, for forwards that draw from them."""

import random
import sys
from typing import Any

Others = tuple[Any, Any]


def others_state() -> Others:
    """The states of Python's generator and, where it is imported, NumPy's. Takes some 50 µs."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def set_others_state(state: Others) -> None:
    pythons, numpys = state
    random.setstate(pythons)
    if numpys is not None:
        sys.modules["numpy"].random.set_state(numpys)


def others_drawn_since(before: Others) -> bool:
    """Whether anything has drawn from either since its state was `before`."""
    (pythons, numpys), (python_now, numpy_now) = before, others_state()
    if pythons != python_now:
        return True
    if numpys is None or numpy_now is None:
        return False
    # (name, key array, position, whether a normal number waits, that number)
    return numpys[2:] != numpy_now[2:] or bool((numpys[1] != numpy_now[1]).any())
