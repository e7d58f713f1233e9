"""One user after another gets the same pinned memory, and never two at once."""

import ctypes
import mmap

import pytest
import torch

from pagestash.pages import host
from pagestash.pages.host import SpareSlab
from pagestash.pages.slabs import HostSlabs

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def made(monkeypatch):
    """The sizes of slabs that were made, without a GPU, and where the device was waited for."""
    sizes = []

    def mapped(size, device):
        sizes.append(size)
        return mmap.mmap(-1, size)

    monkeypatch.setattr(host, "_mapped", mapped)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: sizes.append("wait"))
    return sizes


def test_the_next_gets_the_memory_of_the_one_before(made):
    spare = SpareSlab()
    first = spare(4096, CUDA)
    at = first.data_ptr()
    del first
    second = spare(2048, CUDA)
    assert (second.data_ptr(), second.numel()) == (at, 2048)
    assert made == [4096, "wait"]


def test_two_at_once_have_memory_of_their_own(made):
    spare = SpareSlab()
    first, second = spare(4096, CUDA), spare(4096, CUDA)
    assert first.data_ptr() != second.data_ptr()
    part, at = first[:512], first.data_ptr()
    del first
    assert spare(4096, CUDA).data_ptr() not in (at, second.data_ptr())
    assert made == [4096, 4096, 4096]
    del part
    assert spare(4096, CUDA).data_ptr() == at


def test_a_larger_one_is_made_when_the_last_is_gone(made):
    spare = SpareSlab()
    spare(1024, CUDA)
    assert spare(4096, CUDA).numel() == 4096
    assert spare(2048, CUDA).numel() == 2048
    assert made == [1024, "wait", 4096, "wait"]
    assert spare(2047, CUDA).numel() == 2047
    assert made[-2:] == ["wait", 2047], "most of it would be pinned for nobody"


def test_pinned_memory_is_let_go_while_it_is_mapped(monkeypatch):
    """Afterwards its pages may be those of another map that is pinned."""
    calls = []

    class Driver:
        def cudaHostRegister(self, address, size, flags):
            calls.append(("pin", address))
            return 0

        def cudaHostUnregister(self, address):
            calls.append(("unpin", address, ctypes.string_at(address, 4)))

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    slab = host.host_slab(4096, CUDA)
    slab[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    part, at = slab[1:], slab.data_ptr()
    del slab
    assert calls == [("pin", at)]
    del part
    assert calls[1:] == [("unpin", at, bytes([1, 2, 3, 4]))]


def test_memory_of_a_cpu_is_made_anew(made):
    spare = SpareSlab()
    for _ in range(2):
        spare(1024, CPU)
    assert made == [1024, 1024]


def test_slabs_that_grow_take_it_again(made):
    spare = SpareSlab()
    one = HostSlabs(CPU, 1 << 20, lambda size, device: spare(size, CUDA))
    one.fit(4096)
    block = one.take(1024)
    one.fit(8192)  # while it is in use: beside it
    assert one.size == 8192
    assert made == [4096, 4096]
    one.give(block)
    at = block.memory.data_ptr()
    del block
    one.fit(2048)
    assert one.size == 2048
    assert one.take(2048).memory.data_ptr() == at
    assert made == [4096, 4096, "wait"]
