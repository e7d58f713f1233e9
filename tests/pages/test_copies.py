"""Copies of a group in one call: what the CUDA runtime is asked for, and what happens where it refuses."""

import ctypes

import pytest
import torch

from pagestash.pages.copies import BatchedCopies, copy_each

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


def test_an_error_is_taken_back_and_said():
    runtime = Runtime(status=801)
    destinations, sources = pairs((2,), (3,))
    assert not BatchedCopies(runtime.call, runtime.clear_error).start(destinations, sources, 1)
    assert runtime.cleared == 1
    assert all(torch.isnan(each).all() for each in destinations)


def test_an_empty_tensor_is_left_to_torch():
    runtime = Runtime()
    copies = BatchedCopies(runtime.call, runtime.clear_error)
    assert not copies.start(*pairs((2,), (0,)), 1)
    assert not runtime.streams


def test_without_a_gpu_torch_copies():
    destinations, sources = pairs((2,), (0,), (5, 3))
    copy_each(destinations, sources, torch.device("cpu"))
    assert all(map(torch.equal, destinations, sources))
