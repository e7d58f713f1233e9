"""Ranks of `torch.distributed` that plan together: all measure the same steps, and get the same plan."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """All ranks, or this process alone. Every call is one of all ranks."""

    def __init__(self) -> None:
        there = dist.is_available() and dist.is_initialized()
        self.count = dist.get_world_size() if there else 1
        self.own = dist.get_rank() if there else 0

    def all(self, value: T) -> list[T]:
        """The value of each rank."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def first(self, value: T) -> T:
        """That of rank 0."""
        if self.count == 1:
            return value
        found: list[Any] = [value if self.own == 0 else None]
        dist.broadcast_object_list(found)
        return found[0]

    def together(self, run: Callable[[], T]) -> T | None:
        """What `run` returns; None if any rank has run out of memory. An error of one rank is one of all."""
        found: T | None = None
        error: BaseException | None = None
        try:
            found = run()
        except Exception as raised:
            error = raised.with_traceback(None)  # which holds what it had allocated
        said = self.all(_in_words(error))
        if isinstance(error, Exception) and not isinstance(error, torch.OutOfMemoryError):
            raise error
        for rank, what in enumerate(said):
            if what not in (None, _OUT_OF_MEMORY):
                raise RuntimeError(f"rank {rank}: {what}")
        return found if said == [None] * len(said) else None


class Alone(Ranks):
    """This process, whatever others there are."""

    def __init__(self) -> None:
        self.count, self.own = 1, 0


_OUT_OF_MEMORY = "out of memory"


def _in_words(error: BaseException | None) -> str | None:
    if error is None or isinstance(error, torch.OutOfMemoryError):
        return None if error is None else _OUT_OF_MEMORY
    return f"{type(error).__name__}: {error}"
