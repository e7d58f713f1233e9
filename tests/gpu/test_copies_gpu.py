"""Copies of a group in one call of the CUDA runtime: all bytes, in the order of the stream, and in a capture."""

import pytest
import torch

from pagestash.pages import copies
from pagestash.pages.copies import copy_each
from pagestash.pages.host import host_slab

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
LONG = 20_000_000  # cycles: about 10 ms, far longer than any copy here
SIZES = (1, 2, 8, 33)


def in_host(sizes: list[int]) -> list[torch.Tensor]:
    """Pieces of one slab, as offload has them, full of NaN."""
    slab = host_slab(4 * sum(sizes), DEVICE).view(torch.float32)
    slab.fill_(float("nan"))
    return list(slab.split(sizes))


def lengths(count: int) -> list[int]:
    return [(7919 * (index + 1)) % 100_003 + 1 for index in range(count)]


@pytest.fixture(params=["a stream", "the default stream"], autouse=True)
def current(request):
    """The default stream is one on which the runtime's function is refused."""
    with torch.cuda.stream(torch.cuda.Stream() if request.param == "a stream" else None):
        yield request.param


@pytest.mark.parametrize("count", SIZES)
def test_all_bytes_go_out_and_come_back(count):
    sizes = lengths(count)
    sources = [torch.randn(size, device=DEVICE) for size in sizes]
    back = [torch.full_like(source, float("nan")) for source in sources]
    host = in_host(sizes)
    copy_each(host, sources, DEVICE)
    copy_each(back, host, DEVICE)
    torch.cuda.synchronize()
    assert all(torch.equal(here, source.cpu()) for here, source in zip(host, sources))
    assert all(map(torch.equal, back, sources))


def test_the_runtime_is_asked_where_it_is_known(monkeypatch, current):
    """Else this file tests torch alone."""
    known = (torch.version.cuda or "").startswith("13.")
    assert (copies._batched(DEVICE) is not None) == known
    asked = []
    monkeypatch.setattr(copies, "foreach_copy_", lambda *_, **__: asked.append("torch"))
    host, sources = in_host([4, 4]), [torch.ones(4, device=DEVICE) for _ in range(2)]
    copy_each(host, sources, DEVICE)
    torch.cuda.synchronize()
    assert asked == ([] if known and current == "a stream" else ["torch"])
    assert all(bool((each == 1).all()) for each in host) or asked


@pytest.mark.parametrize("late", ["before", "behind"])
def test_copies_are_in_the_order_of_the_current_stream(late):
    """What is written late before them is copied, and what is written behind late copies is not."""
    sizes = lengths(8)
    sources = [torch.zeros(size, device=DEVICE) for size in sizes]
    host = in_host(sizes)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    for source in sources if late == "before" else ():
        source.fill_(1)
    copy_each(host, sources, DEVICE)
    for source in sources:
        source.fill_(2)
    done = torch.cuda.current_stream().record_event()
    assert not done.query()  # the host did not wait
    done.synchronize()
    assert all(bool((each == (late == "before")).all()) for each in host)


def test_an_event_behind_the_copies_waits_for_all_of_them():
    sizes = [32 << 20] * 4
    sources = [torch.ones(size, device=DEVICE) for size in sizes]
    host = in_host(sizes)
    torch.cuda.synchronize()
    copy_each(host, sources, DEVICE)
    torch.cuda.current_stream().record_event().synchronize()
    assert all(bool((each == 1).all()) for each in host)


def test_a_capture_has_them_too():
    sizes = lengths(8)
    sources = [torch.zeros(size, device=DEVICE) for size in sizes]
    host = in_host(sizes)
    copy_each(host, sources, DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for source in sources:
            source.add_(1)
        copy_each(host, sources, DEVICE)
    for count in (1, 2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(bool((each == count).all()) for each in host)


def test_a_refused_call_leaves_no_error_behind_where_batched_copies_are_known(monkeypatch):
    """Attributes of a copy that is not there are refused; torch's next kernel must not hear of it."""
    batched = copies._batched(DEVICE)
    if batched is None:
        pytest.skip("the CUDA runtime is not one whose batched copies are known")
    host = in_host([4, 4])
    sources = [torch.ones(4, device=DEVICE) for _ in host]
    monkeypatch.setattr(batched, "_for_all", (copies.ctypes.c_size_t * 1)(5))  # beyond the copies: invalid
    assert not batched.start(host, sources, torch.cuda.current_stream().cuda_stream)
    copy_each(host, sources, DEVICE)
    assert (torch.ones(3, device=DEVICE) + 1).sum().item() == 6
    assert all(bool((each == 1).all()) for each in host)


def test_the_trial_copies_to_the_device_where_that_is_the_default_for_new_tensors():
    copies._batched.cache_clear()
    with torch.device(DEVICE):
        found = copies._batched(DEVICE)
    assert (found is not None) == (torch.version.cuda or "").startswith("13.")
