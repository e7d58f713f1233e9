import pytest


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch):
    """The interpreter would dominate every time; what is saved is the same."""
    monkeypatch.setattr("pagestash.kernels.backend.interpreted", lambda: False)
