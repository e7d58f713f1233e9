"""The two tiers of tests: `make test` runs what is not marked slow, `make test-all` the rest as well."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def slow(*cases: Any) -> list[Any]:
    """These cases of a parametrised test are for `make test-all`; a tuple has the values of several names."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def slow_but(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Of these cases the quick ones for `make test`, and the others for the rest."""
    quick = list(quick)
    return [case if case in quick else slow(case)[0] for case in cases]


KERNELS_IN_THE_REST = pytest.mark.parametrize("backend", ["torch", *slow("triton")], indirect=True)
"""A whole model by interpreted kernels takes seconds: `make test` has one such test of a kind, and those of the
kernels alone."""


def sweep(few: int, many: int, *drawn: SearchStrategy) -> Callable[[Callable], Callable]:
    """A property of what is drawn: of the same few examples in `make test`, and of many, at random, in the rest."""

    def decorate(test: Callable) -> Callable:
        def over(examples: int) -> None:
            profile = settings(max_examples=examples, derandomize=examples == few, deadline=None)
            profile(given(*drawn)(test))()

        over.__name__, over.__doc__, over.__module__ = test.__name__, test.__doc__, test.__module__
        return pytest.mark.parametrize("examples", [few, *slow(many)])(over)

    return decorate
