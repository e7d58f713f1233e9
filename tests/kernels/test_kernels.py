"""The operations on their own, kernel against reference: every byte boundary, and the choice between the two."""

import inspect

import pytest
import torch

from pagestash.kernels import backend as backends
from pagestash.kernels.moe import activations
from pagestash.kernels.pages import chunks, copy, paged, release, stash
from pagestash.kernels.pages.layout import (
    ACCOUNTS,
    HEADER,
    HOST_BASE,
    Counter,
    Header,
    PoolMemory,
    Span,
    Status,
    chunk_bytes,
)

PATTERN = int.from_bytes(bytes([0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0xFE]), "little", signed=True)


def make_memory(backend, page_bytes, device_pages, host_pages):
    state = torch.zeros(len(Counter), dtype=torch.int64)
    state[Counter.DEVICE_FREE], state[Counter.HOST_FREE] = device_pages, host_pages
    return PoolMemory(
        page_bytes=page_bytes,
        backend=backend,
        device_slab=torch.full((device_pages * page_bytes,), 0xFF, dtype=torch.uint8),
        host_slab=torch.full((host_pages * page_bytes,), 0xFF, dtype=torch.uint8),
        device_ring=torch.arange(device_pages, dtype=torch.int32),
        host_ring=torch.arange(HOST_BASE, HOST_BASE + host_pages, dtype=torch.int32),
        state=state,
        accounts=torch.zeros(ACCOUNTS, 2, dtype=torch.int64),
        overflow=torch.zeros(()),
    )


def reserved(memory, capacity, rows):
    """A book for one tensor of `capacity` single bytes, `rows` of them valid."""
    span = Span(1, capacity, HEADER)
    book = torch.zeros(HEADER + -(-capacity // memory.page_bytes), dtype=torch.int64)
    stash.reserve(memory, [span], [rows], None, book, 0)
    return span, book


def bytes_at(count, skew, value=None):
    """`count` bytes at an address that is `skew` past a multiple of 16."""
    memory = torch.full((count + 15 + skew,), 0xFF, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + skew
    view = memory[start : start + count]
    return view if value is None else view.copy_(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_bytes", "skew", "stride"), [(16, 0, 1), (16, 1, 3), (16, 8, 3), (48, 0, 5), (64, 0, 3), (64, 1, 7)]
)
def test_every_length_is_copied_and_filled_to_the_byte(backend, page_bytes, skew, stride):
    """Lengths up to a few chunks, into buffers aligned and not; the bytes beside the buffer stay."""
    capacity = page_bytes + 21
    source = torch.arange(capacity, dtype=torch.uint8)
    pattern = torch.tensor([PATTERN]).view(torch.uint8).repeat(capacity)[:capacity]
    for length in [*range(0, capacity, stride), capacity]:
        memory = make_memory(backend, page_bytes, 1, 2)
        span, book = reserved(memory, capacity, length)
        copy.copy_to_pages(memory, [bytes_at(capacity, skew, source)], [span], [0], book)
        in_pages = torch.cat([memory.device_slab, memory.host_slab])
        assert torch.equal(in_pages[:length], source[:length])
        assert bool((in_pages[length:] == 0xFF).all()), length
        around = bytes_at(capacity + 16, skew)
        copy.copy_from_pages(memory, [around[:capacity]], [span], [0], book, [PATTERN])
        assert torch.equal(around[:length], source[:length]), length
        assert torch.equal(around[length:capacity], pattern[length:]), length
        assert bool((around[capacity:] == 0xFF).all()), length


def test_a_refused_book_fills_the_whole_buffer(backend):
    memory = make_memory(backend, 16, 1, 0)
    span, book = reserved(memory, 37, 37)
    assert book[Header.STATUS] == Status.REFUSED
    for pattern, expected in ((None, 0), (PATTERN, PATTERN)):
        buffer = bytes_at(37, 0)
        copy.copy_from_pages(memory, [buffer], [span], [0], book, [pattern])
        assert torch.equal(buffer, torch.tensor([expected]).view(torch.uint8).repeat(5)[:37])
    buffer = bytes_at(37, 0)
    copy.copy_from_pages(memory, [buffer], [span], [0], book, [PATTERN], tiers="host")
    assert bool((buffer == 0xFF).all())


def test_reserving_writes_the_book_and_no_page(backend):
    memory = make_memory(backend, 16, 2, 2)
    memory.state[Counter.DEVICE_HEAD] = 1
    span, book = reserved(memory, 40, 33)
    assert book.tolist() == [3, 2, 33, Status.GRANTED, 3, 1, 0, HOST_BASE]
    assert memory.state[
        [Counter.DEVICE_HEAD, Counter.DEVICE_FREE, Counter.HOST_HEAD, Counter.HOST_FREE]
    ].tolist() == [
        1,
        0,
        1,
        1,
    ]
    assert bool((memory.device_slab == 0xFF).all())
    release.release(memory, [span], [0], book, 0)
    assert memory.state[[Counter.DEVICE_FREE, Counter.HOST_FREE, Counter.WANTED]].tolist() == [2, 2, 0]
    assert memory.device_ring.tolist() == [0, 1]
    assert memory.host_ring.tolist() == [HOST_BASE + 0, HOST_BASE + 1]
    assert book[Header.STATUS] == Status.EMPTY


@pytest.mark.parametrize("tensors", [1, 8, 9, 17])
def test_groups_of_any_size_go_through_the_fused_and_the_unfused_path(tensors):
    """The same group in both backends: one launch up to eight tensors, reserve and copies above."""
    pytest.importorskip("triton")
    books, slabs = [], []
    for backend in ("torch", "triton"):
        memory = make_memory(backend, 16, 20, 10)
        spans = [Span(3, 5 + i, HEADER * tensors + 3 * i) for i in range(tensors)]
        book = torch.zeros(HEADER * tensors + 10 * tensors, dtype=torch.int64)
        sources = [torch.arange(span.max_bytes, dtype=torch.uint8) + i for i, span in enumerate(spans)]
        rows = torch.tensor(7, dtype=torch.int32)
        fixed = [-1 if i % 2 else 1 for i in range(tensors)]
        if tensors <= stash.FUSED:
            stash.stash(memory, sources, spans, fixed, rows, book, 3)
        else:
            stash.reserve(memory, spans, fixed, rows, book, 3)
            copy.copy_to_pages(memory, sources, spans, range(tensors), book)
        books.append(book)
        slabs.append(torch.cat([memory.device_slab, memory.host_slab, memory.state.view(torch.uint8)]))
    assert books[0].count_nonzero() > 0
    assert torch.equal(*books)
    assert torch.equal(*slabs)


@pytest.mark.parametrize(
    ("page_bytes", "most", "expected"),
    [(65536, 16384, 16384), (64, 16384, 64), (48, 16384, 16), (12288, 16384, 4096)],
)
def test_a_chunk_is_a_power_of_two_that_divides_the_page(page_bytes, most, expected):
    assert chunk_bytes(page_bytes, most) == expected
    assert page_bytes % expected == 0


def test_counters_of_kernels_are_those_of_the_reference():
    from pagestash.kernels.pages import layout

    kernel = {
        name: getattr(value, "value", value) for name, value in vars(layout).items() if name.startswith("K_")
    }
    assert kernel["K_HOST_BASE"] == HOST_BASE
    assert kernel["K_HEADER"] == HEADER == len(Header)
    assert kernel["K_DEVICE_FREE"] == Counter.DEVICE_FREE
    assert kernel["K_WANTED_PEAK"] == Counter.WANTED_PEAK
    assert kernel["K_REFUSED"] == Status.REFUSED


def test_backend_is_chosen_by_device_and_by_name(monkeypatch):
    cpu = torch.device("cpu")
    assert backends.choose(cpu, "torch") == "torch"
    with pytest.raises(ValueError, match="backend='jax': expected 'auto', 'triton' or 'torch'"):
        backends.choose(cpu, "jax")
    monkeypatch.setattr(backends, "interpreted", lambda: False)
    assert backends.choose(cpu) == "torch"
    with pytest.raises(ValueError, match="cannot run on cpu"):
        backends.choose(cpu, "triton")
    monkeypatch.setattr(backends, "HAS_TRITON", True)
    assert backends.choose(torch.device("cuda", 0)) == "triton"
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    assert backends.choose(torch.device("cuda", 0)) == "torch"


@pytest.mark.parametrize("value", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 1024, 4097])
def test_sizes_on_the_host_are_tritons(value):
    triton = pytest.importorskip("triton")
    assert backends.power_of_two(value) == triton.next_power_of_2(value)
    for by in (1, 3, 64):
        assert backends.cdiv(value, by) == triton.cdiv(value, by)


def test_constants_written_in_kernels_are_those_of_the_references():
    pytest.importorskip("triton")

    def defaults(function):
        return {
            name: parameter.default
            for name, parameter in inspect.signature(function.fn).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }

    assert defaults(paged.granted_bytes) == {
        "HEADER": HEADER, "STATUS": Header.STATUS, "BYTES": Header.BYTES, "GRANTED": Status.GRANTED,
    }  # fmt: skip
    assert defaults(chunks.page_address) == {"HOST_BASE": HOST_BASE}
    assert defaults(activations.activate) == {
        "GELU_SCALE": activations.GELU_SCALE,
        "GELU_CUBE": activations.GELU_CUBE,
        "GELU_CUBE_SLOPE": 3 * activations.GELU_CUBE,
        "SQRT_HALF": activations.SQRT_HALF,
        "NORMAL_SCALE": activations.NORMAL_SCALE,
    }
