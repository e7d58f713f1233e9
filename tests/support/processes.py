"""Processes of several ranks, forked from a server that has imported torch and the package once.

Importing them anew in every process took longer than most of what the processes do.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.multiprocessing as mp

PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "pagestash.moe",
    "pagestash.pipeline",
    "pagestash.train",
    "pytest",
]


@contextmanager
def server() -> Iterator[Any]:
    """A multiprocessing context to start processes from; in them the torch references stand for the kernels.

    Triton reads that from the environment when it is imported, and the server has the environment of its first
    start: every start is therefore the same.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        mp.set_forkserver_preload(PRELOADED)
        yield mp.get_context("forkserver")


def start_ranks(work: Any, args: tuple, ranks: int, imports: tuple[str, ...] = ()) -> None:
    """Run `work(rank, *args)` in `ranks` processes, and wait; if one raises, so does this.

    What `imports` names is imported once, before the processes part: for what few files need.
    """
    with server():
        if imports:
            mp.start_processes(_import_and_start, (work, args, ranks, imports), start_method="forkserver")
        else:
            mp.start_processes(work, args, nprocs=ranks, start_method="forkserver")


def _import_and_start(_: int, work: Any, args: tuple, ranks: int, imports: tuple[str, ...]) -> None:
    for name in imports:
        importlib.import_module(name)
    mp.start_processes(work, args, nprocs=ranks, start_method="fork")
