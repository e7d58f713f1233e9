"""How much memory a step takes, from one segment to the next."""

import weakref
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from pagestash.torch_internals import LOCAL_PART, TorchDispatchMode, key_of_storage, tree_leaves


class Reading(NamedTuple):
    """Bytes that are allocated now, and the most since the reading before."""

    now: int
    peak: int


class MemoryMeter:
    """A clock that reads memory instead of time: at every cut of a step's timeline.

    On a GPU it reads the allocator, whose peak statistics start anew at each reading. A CPU has none: there every
    operation's results are counted until they are freed, without what an operation takes for itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.readings: list[Reading] = []
        """One for each segment, relative to the start of the step."""
        self._device = device
        self._start, self._begun = 0, False
        self._live = LiveStorages() if device.type == "cpu" else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def mark(self) -> Reading:
        found = self._read()
        if not self._begun:
            self._begun, self._start = True, found.now
        return found

    def _read(self) -> Reading:
        if self._live is not None:
            return self._live.read()
        if self._device.type != "cuda":
            return Reading(0, 0)
        now, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return Reading(now, peak)

    def now(self) -> int:
        """Bytes that are allocated now, relative to the start of the step; takes no reading."""
        if self._live is not None:
            return self._live.now - self._start
        return torch.cuda.memory_allocated(self._device) - self._start if self._device.type == "cuda" else 0

    def between(self, marks: list[Reading]) -> list[float]:
        start = marks[0].now
        self.readings = [Reading(mark.now - start, mark.peak - start) for mark in marks[1:]]
        return [0.0] * len(self.readings)


class LiveStorages(TorchDispatchMode):
    """Counts the storages that operations allocate, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()
        self.now = self._peak = 0

    def read(self) -> Reading:
        found = Reading(self.now, self._peak)
        self._peak = self.now
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for tensor in _plain_tensors(result):
            storage = tensor.untyped_storage()
            key = key_of_storage(storage)
            if key in self._known:
                continue
            if given is None:
                given = {key_of_storage(t.untyped_storage()) for t in _plain_tensors((args, kwargs))}
            if key not in given:
                self._add(storage, key)
        return result

    def _add(self, storage: torch.UntypedStorage, key: int) -> None:
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        self._peak = max(self._peak, self.now)
        # torch keeps one Python object for a storage, which ends with it.
        weakref.finalize(storage, self._freed, key, size).atexit = False

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _plain_tensors(tree: Any) -> list[torch.Tensor]:
    found = (getattr(leaf, LOCAL_PART, leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [tensor for tensor in found if tensor.layout == torch.strided and tensor.device.type == "cpu"]
