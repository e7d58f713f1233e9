"""Hand-overs between the compute stream and the communication stream, each with one side held back.

NaN stands in memory that is free and memory that is not written yet. Each wait, taken away, makes the test of its
hand-over fail.
"""

import pytest
import torch
import torch.distributed as dist

from pagestash.moe.parallel import collectives
from pagestash.moe.parallel.collectives import Ranks, UnderWay, communication_stream
from pagestash.saved.streams import SideStream
from pagestash.torch_internals import spin

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LONG = 40_000_000  # cycles: about 20 ms
ROWS, WIDTH = 4096, 256


@pytest.fixture(scope="module", autouse=True)
def nccl(tmp_path_factory):
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    Ranks(None, 1).start_all_to_all(torch.ones(4, device=CUDA)).finish()  # sets up the communicator
    torch.cuda.synchronize()
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def free_memory_is_nan():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = [nan() for _ in range(8)]
    torch.cuda.synchronize()
    del held


def nan():
    return torch.full((ROWS, WIDTH), torch.nan, device=CUDA)


def hold_back_the_wire():
    with communication_stream(CUDA).after():
        spin(LONG)


def compute_is_late():
    """What is sent is written late."""
    sent = nan()
    spin(LONG)
    sent.fill_(1)
    return Ranks(None, 1).start_all_to_all(sent).finish()


def wire_is_late():
    """The result is read as soon as it may be."""
    sent = torch.ones(ROWS, WIDTH, device=CUDA)
    hold_back_the_wire()
    return Ranks(None, 1).start_all_to_all(sent).finish() * 1


def memory_goes_on():
    """What was sent is let go of when it may be, and its memory is written over by its next owner."""
    sent = torch.ones(ROWS, WIDTH, device=CUDA)
    hold_back_the_wire()
    under_way = Ranks(None, 1).start_all_to_all(sent)
    del sent
    others = [nan() for _ in range(4)]
    result = under_way.finish()
    others += [nan() for _ in range(4)]
    return result


def given_up():
    """A collective that nobody waits for writes to no memory of others."""
    sent = torch.ones(ROWS, WIDTH, device=CUDA) * 2
    hold_back_the_wire()
    under_way = Ranks(None, 1).start_all_to_all(sent)
    del under_way  # (what was sent stays, or its next owner's ones would be what is written)
    return [torch.ones(ROWS, WIDTH, device=CUDA) for _ in range(4)]


def not_after_the_present(monkeypatch):
    monkeypatch.setattr(SideStream, "after", lambda self, *_: torch.cuda.stream(self._stream))


def without_the_wait_of_finish(monkeypatch):
    monkeypatch.setattr(collectives, "wait_here", lambda event: None)


def without_holding_what_is_sent(monkeypatch):
    start = UnderWay.__init__

    def forgets(self, *args):
        start(self, *args)
        self._sent = None

    monkeypatch.setattr(UnderWay, "__init__", forgets)


def without_telling_the_allocator(monkeypatch):
    monkeypatch.setattr(SideStream, "outlive", lambda self, buffers: None)


HAND_OVERS = {
    compute_is_late: not_after_the_present,
    wire_is_late: without_the_wait_of_finish,
    memory_goes_on: without_holding_what_is_sent,
    given_up: without_telling_the_allocator,
}


def all_ones(found):
    torch.cuda.synchronize()
    return all(bool((each == 1).all()) for each in (found if isinstance(found, list) else [found]))


@pytest.mark.parametrize("hand_over", HAND_OVERS, ids=lambda each: each.__name__)
def test_each_hand_over_is_safe_with_one_side_held_back(hand_over):
    assert all_ones(hand_over())


@pytest.mark.parametrize("hand_over", HAND_OVERS, ids=lambda each: each.__name__)
def test_without_its_wait_a_hand_over_is_not_safe(hand_over, monkeypatch):
    HAND_OVERS[hand_over](monkeypatch)
    assert not all_ones(hand_over())
