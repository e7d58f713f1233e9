"""The torch reference of every kernel: the Triton ones have tests of their own, and are slow on a CPU."""

import pytest


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch):
    monkeypatch.setattr("pagestash.kernels.backend.interpreted", lambda: False)
