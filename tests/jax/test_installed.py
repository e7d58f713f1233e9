"""Says why, where the other tests of this folder are missing from a run."""

import importlib.util

import pytest


@pytest.mark.skipif(
    importlib.util.find_spec("jaxlib") is None, reason="jax is missing: pip install pagestash[jax]"
)
def test_four_virtual_devices_are_there():
    import jax

    assert len(jax.devices("cpu")) == 4
