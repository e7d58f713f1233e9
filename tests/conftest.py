"""What every test shares: kernels that run without a GPU, one thread, one seed, and hypothesis' budget."""

import gc
import importlib
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Read when a kernel is decorated, so before anything imports pagestash: the real kernels, on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# JAX would take three quarters of a GPU for itself, beside the torch tests of the same process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Small tensors gain nothing from a second thread, which waits for the first by spinning: twice the CPU time,
# and several times the wall time beside other work. The variable is for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# Commands print as wide as it says; pytest-xdist sets it.
os.environ.pop("COLUMNS", None)
if not HAS_CUDA and hasattr(torch.random, "_manual_seed_impl"):
    # It would also queue the seed for devices that are not there, each time with the formatted stack of the call:
    # milliseconds, more than all else in many a test.
    torch.random._manual_seed_impl = lambda seed: torch.default_generator.manual_seed(int(seed))

HERE = Path(__file__).parent


# `benchmarks` from the root, `support`, and the operation sequences that CPU and GPU tests have in common.
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "pages")]
if not HAS_CUDA:
    with suppress(ImportError):  # triton: the tests of its kernels say so themselves
        importlib.import_module("support.interpreter").prepare()
    # Before any file imports jax, wherever it stands: XLA reads its flags once.
    runpy.run_path(str(HERE / "jax" / "conftest.py"))

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # tests/gpu needs none of it
    pass
else:
    slow_interpreter = [HealthCheck.too_slow, HealthCheck.data_too_large]
    # Ordinary runs see the same examples every time; the sweeps of `support.tiers` look further, and at random.
    settings.register_profile(
        "default", deadline=None, max_examples=40, derandomize=True, suppress_health_check=slow_interpreter
    )
    settings.load_profile("default")


def pytest_collection_modifyitems(items):
    if not HAS_CUDA:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True, scope="module")
def _hide_from_the_collector():
    """Hide what has been imported and cached from the garbage collector: each look at it takes a third of a second.

    For every file, as tests import and compile as well.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # else JAX reports at exit what it takes for leaks


@pytest.fixture(autouse=True)
def _seed():
    """The same random numbers whatever ran before."""
    torch.manual_seed(0)


RUN_KERNELS = ("kernels", "pages")
"""Folders whose tests run Triton kernels wherever they name no backend."""


@pytest.fixture(autouse=True, scope="module")
def _references(request):
    """The torch references where a test names no backend: kernels have tests of their own, and take long.

    It comes before the module's other fixtures, which may run a model, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_CUDA and request.path.parent.name not in RUN_KERNELS:
            patch.setattr("pagestash.kernels.backend.interpreted", lambda: False)
        yield


@pytest.fixture
def interpreted_kernels(monkeypatch):
    """Triton kernels on the CPU, also where the code under test names no backend."""
    pytest.importorskip("triton", reason="triton is not installed")
    if HAS_CUDA:
        pytest.skip("the kernels are compiled")
    monkeypatch.setattr("pagestash.kernels.backend.interpreted", lambda: True)


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    """Each implementation in turn: the torch reference, and the Triton kernels."""
    if request.param == "triton" and not HAS_CUDA:
        request.getfixturevalue("interpreted_kernels")
    return request.param


@pytest.fixture
def lone_rank(tmp_path):
    """A process group of one: collectives run, and go nowhere."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
