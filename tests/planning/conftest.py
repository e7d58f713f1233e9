import pytest

from pagestash.planning import candidates, search

THOROUGH = ("test_recorded_profiles",)
"""Files that compare plans with the best there is, or with figures."""

EFFORT = (
    (search, "MOST", 30),
    (candidates, "GRID", 4),
    (candidates, "EXHAUSTIVE", 100),
    (candidates, "EXHAUSTIVE_ON_A_RANK", 100),
)


@pytest.fixture(autouse=True)
def quick_search(request, monkeypatch):
    """Searches with less effort, where it does not matter how good a plan is: that takes minutes less."""
    if request.path.stem not in THOROUGH and "whole_search" not in request.keywords:
        for module, name, little in EFFORT:
            monkeypatch.setattr(module, name, little)
