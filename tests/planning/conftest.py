import pytest
from support.search import search_little

from pagestash.planning import candidates, search

THOROUGH = ("test_recorded_profiles",)
"""Files that compare plans with the best there is, or with figures."""


@pytest.fixture(autouse=True)
def quick_search(request, monkeypatch):
    """Searches with less effort, where it does not matter how good a plan is: that takes minutes less."""
    if request.path.stem in THOROUGH or "whole_search" in request.keywords:
        return
    if "slow" in request.keywords:
        monkeypatch.setattr(search, "MOST", 100)
        monkeypatch.setattr(candidates, "EXHAUSTIVE", candidates.EXHAUSTIVE_ON_A_RANK)
    else:
        search_little(monkeypatch)
