"""Profiles on a GPU: the sum against the allocator's own figure, the times, and the measured link."""

import pytest
import torch

import pagestash as ps
from pagestash.models import Decoder, preset

pytestmark = pytest.mark.gpu
BLOCK = 512
"""The allocator hands out multiples of this."""


def make(dtype=torch.bfloat16, layers=3):
    torch.manual_seed(0)
    config = preset("qwen3-30b-a3b", layers=layers, vocab=8192, experts=16)
    model = Decoder(config, device="cuda", dtype=dtype)
    model.initialise(0)
    tokens = torch.randint(0, 8192, (2, 2049), device="cuda")
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def rounded(size):
    return -(-size // BLOCK) * BLOCK


def left_by_forward(model, batch, autocast):
    """What the allocator counts after forward and not before, without the losses."""

    def forward():
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return model(*batch)

    sum(forward()).backward()
    model.zero_grad()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    output = forward()
    after = torch.cuda.memory_allocated()
    results = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in output}
    return after - before - sum(map(rounded, results.values()))


@pytest.mark.parametrize("autocast", [False, True])
def test_the_sum_agrees_with_the_allocator_within_two_percent(autocast):
    model, batch = make(torch.float32 if autocast else torch.bfloat16)
    allocated = left_by_forward(model, batch, autocast)
    found = ps.profile(model, batch, repeats=1, autocast=torch.bfloat16 if autocast else None)
    counted = sum(rounded(tensor.counted) for tensor in found.tensors)
    print(f"counted {counted:,}, allocated {allocated:,}, asked for {found.allocated_bytes:,}")
    assert counted > 500e6
    assert abs(counted - allocated) <= 0.02 * allocated
    assert abs(found.total_bytes - found.allocated_bytes) <= 0.02 * found.allocated_bytes
    assert (found.bytes_of("weight_cast") > 0) is autocast


@pytest.mark.alone
def test_regions_take_together_what_the_step_takes():
    model, batch = make()
    found = ps.profile(model, batch, repeats=5)
    watched = found.forward_seconds + found.backward_seconds
    print(f"watched {1e3 * watched:.2f} ms, plain {1e3 * found.plain_seconds:.2f} ms")
    # No more than the step itself: watching it is not counted. Less, by the gaps between its launches.
    assert 0.2 * found.plain_seconds < watched < 1.05 * found.plain_seconds
    layers = [found.region(f"layers.{index}") for index in range(3)]
    assert all(layer.total_forward_seconds > 0 for layer in layers)
    forward, backward = (
        sum(getattr(layer, f"total_{way}_seconds") for layer in layers) for way in ("forward", "backward")
    )
    assert forward < backward
    # Equal layers take equal times, and most of a layer is in its experts.
    assert layers[1].total_forward_seconds == pytest.approx(layers[2].total_forward_seconds, rel=0.2)
    moe = found.region("layers.1.moe")
    assert moe.total_forward_seconds > 0.3 * layers[1].total_forward_seconds


@pytest.mark.alone
def test_the_link_is_measured_and_a_policy_judged_by_it():
    model, batch = make()
    found = ps.profile(model, batch, repeats=1)
    link = found.link
    print(link)
    assert link.measured
    assert 3e9 < link.out < 1e12
    assert 3e9 < link.back < 1e12
    assert link.copy > 4 * max(link.out, link.back)
    # A window of two groups, so that the first of three layers moves.
    window = 2 * found.region("layers.0.mlp_norm").bytes
    norms = found.fits(
        ps.Policy([ps.Rule("layers.*.mlp_norm", "offload", prefetch_bytes=window + window // 10)])
    )
    assert norms.fits
    assert norms.moved_bytes > 0
    whole = found.fits("layers.**")
    assert whole.moved_bytes + whole.staying_bytes > 0.9 * found.region("layers.0").total_bytes * 3
    slow = ps.profile(model, batch, repeats=1, link=1e6)
    assert not slow.fits("layers.**").fits


@pytest.mark.parametrize("reads", ["nothing", "in forward", "in backward"])
def test_a_step_that_makes_the_host_wait_is_found(reads):
    model, batch = make(layers=1)
    assert not ps.profile(model, batch, repeats=1).host_waits

    def read(tensor):
        return tensor if tensor.sum().item() is not None else None

    with_read = {
        "nothing": lambda output: sum(output),
        "in forward": lambda output: read(sum(output)),
        "in backward": lambda output: _hooked(sum(output), read),
    }
    before = torch.cuda.get_sync_debug_mode()
    found = ps.profile(model, batch, repeats=1, loss=with_read[reads])
    assert found.host_waits == (reads != "nothing")
    assert torch.cuda.get_sync_debug_mode() == before


def _hooked(loss, read):
    loss.register_hook(read)
    return loss
