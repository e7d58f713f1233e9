import pytest
from support.search import search_little

THOROUGH = ("test_recorded_profiles",)
"""Files that compare plans with the best there is, or with figures."""


@pytest.fixture(autouse=True)
def quick_search(request, monkeypatch):
    """Searches with less effort, where it does not matter how good a plan is: that takes minutes less."""
    if request.path.stem not in THOROUGH and "whole_search" not in request.keywords:
        search_little(monkeypatch)
