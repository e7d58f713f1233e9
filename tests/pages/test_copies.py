"""Copies of a group in one call: what the CUDA runtime is asked for, and what happens where it refuses."""

import ctypes
from contextlib import nullcontext

import pytest
import torch

from pagestash.pages import copies as copies_module
from pagestash.pages.copies import BatchedCopies, copies_right, copy_each

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_CALL = ctypes.CFUNCTYPE(
    ctypes.c_int, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER
)


class Runtime:
    """Copies at once, as the device would in its stream; or answers with an error."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.streams: list[int] = []
        self.attributes: list[int] = []
        self.cleared = 0
        self.call = _CALL(self._copy)

    def _copy(self, destinations, sources, sizes, count, attributes, of_all, kinds, stream) -> int:
        if self.status:
            return self.status
        assert (kinds, (_SIZE * 1).from_address(of_all)[0]) == (1, 0)
        self.streams.append(stream)
        self.attributes = list((ctypes.c_int * 6).from_address(attributes))
        arrays = [(_POINTER * count).from_address(each) for each in (destinations, sources)]
        for destination, source, size in zip(*arrays, (_SIZE * count).from_address(sizes)):
            ctypes.memmove(destination, source, size)
        return 0

    def clear_error(self) -> int:
        self.cleared += 1
        return self.status


def pairs(*shapes: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    sources = [torch.randn(shape) for shape in shapes]
    return [torch.full_like(source, float("nan")) for source in sources], sources


@pytest.mark.parametrize("count", [1, 2, 9])
def test_all_bytes_of_every_pair_are_copied_on_the_given_stream(count):
    runtime = Runtime()
    copies = BatchedCopies(runtime.call, runtime.clear_error)
    for stream in (7, 8):  # the second call finds what the first has made
        destinations, sources = pairs(*((3, index + 1) for index in range(count)))
        destinations.append(torch.full((4, 2), float("nan")).t())
        sources.append(torch.randn(4, 2).t())
        assert copies.start(destinations, sources, stream)
        assert all(map(torch.equal, destinations, sources))
    assert runtime.streams == [7, 8]
    assert not runtime.cleared


def test_sources_are_read_in_stream_order_and_no_location_is_given():
    runtime = Runtime()
    assert BatchedCopies(runtime.call, runtime.clear_error).start(*pairs((2,), (3,)), 1)
    assert runtime.attributes == [1, 0, 0, 0, 0, 1]


def test_an_error_is_taken_back_and_said(caplog):
    caplog.set_level("DEBUG", "pagestash")
    runtime = Runtime(status=801)
    destinations, sources = pairs((2,), (3,))
    assert not BatchedCopies(runtime.call, runtime.clear_error).start(destinations, sources, 1)
    assert runtime.cleared == 1
    assert all(torch.isnan(each).all() for each in destinations)
    assert "error 801" in caplog.text


def test_an_empty_tensor_is_left_to_torch():
    runtime = Runtime()
    copies = BatchedCopies(runtime.call, runtime.clear_error)
    assert not copies.start(*pairs((2,), (0,)), 1)
    assert not runtime.streams


def test_without_a_gpu_torch_copies():
    destinations, sources = pairs((2,), (0,), (5, 3))
    copy_each(destinations, sources, torch.device("cpu"))
    assert all(map(torch.equal, destinations, sources))


class GPU:
    """All that `copy_each` asks a GPU for, on a CPU."""

    def __init__(self, monkeypatch, runtime, *, stream=7, captures=False):
        self.by_torch = 0
        batched = None if runtime is None else BatchedCopies(runtime.call, runtime.clear_error)
        monkeypatch.setattr(copies_module, "_batched", lambda device: batched)
        monkeypatch.setattr(copies_module, "current_raw_stream", lambda index: stream)
        monkeypatch.setattr(copies_module, "stream_captures", lambda: captures)
        monkeypatch.setattr(copies_module, "foreach_copy_", self._copy)

    def _copy(self, destinations, sources, non_blocking):
        assert non_blocking
        self.by_torch += 1
        torch._foreach_copy_(destinations, sources)


@pytest.mark.parametrize(
    ("runtime", "how", "by_torch"),
    [
        (Runtime(), {}, 0),
        (Runtime(), {"stream": 0}, 1),
        (Runtime(), {"captures": True}, 1),
        (Runtime(status=801), {}, 1),
        (None, {}, 1),
    ],
    ids=["batched", "the default stream", "a capture", "refused", "no such function"],
)
def test_torch_copies_what_the_runtime_does_not(monkeypatch, runtime, how, by_torch):
    gpu = GPU(monkeypatch, runtime, **how)
    destinations, sources = pairs((2,), (5, 3))
    copy_each(destinations, sources, torch.device("cuda", 0))
    assert all(map(torch.equal, destinations, sources))
    assert gpu.by_torch == by_torch


@pytest.mark.parametrize("loaded", ["12.8", "13.0", None])
def test_where_the_runtime_is_not_there_torch_copies(monkeypatch, loaded):
    """This machine has none, whatever torch says it was built with."""
    monkeypatch.setattr(torch.version, "cuda", loaded)
    monkeypatch.setattr(copies_module, "_RUNTIME", "no_such_library.so")
    assert copies_module._batched.__wrapped__(torch.device("cuda", 0)) is None


def test_a_trial_that_fails_ends_no_step(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    runtime = Runtime()
    library = type("", (), {"cudaMemcpyBatchAsync": runtime.call, "cudaGetLastError": runtime.clear_error})
    monkeypatch.setattr(copies_module.ctypes, "CDLL", lambda name, mode: library)

    def fails(batched, device):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(copies_module, "copies_right", fails)
    assert copies_module._batched.__wrapped__(torch.device("cuda", 0)) is None


@pytest.mark.parametrize(("status", "right"), [(0, True), (801, False)])
def test_the_trial_says_whether_bytes_come_back(monkeypatch, status, right):
    """Also where new tensors are on another device by default."""

    class Stream:
        cuda_stream = 7

        def __init__(self, device):
            pass

        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    runtime = Runtime(status)
    with torch.device("meta"):
        found = copies_right(BatchedCopies(runtime.call, runtime.clear_error), torch.device("cpu"))
    assert found is right
