"""The pool on a GPU: compiled kernels, pinned pages, more than 4 GiB, CUDA graphs and side streams."""

import gc
import math
import random
from contextlib import contextmanager

import pytest
import torch
from three_way import ON_DEVICE, POISON, Spec, ThreeWays, as_bytes

from pagestash.pages.pool import PagePool

pytestmark = pytest.mark.gpu

GIB = 1 << 30
PAGE = 65536
HOLD = 400_000_000  # cycles, some 0.2 s: longer than anything here takes to launch


@pytest.fixture(autouse=True)
def _give_memory_back():
    yield
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def numbered(rows, width_bytes, start=0):
    """A bf16 tensor whose every 8 bytes differ from all others."""
    words = rows * width_bytes // 8
    return torch.arange(start, start + words, device="cuda").view(torch.bfloat16).view(rows, -1)


def same_bytes(a, b):
    return torch.equal(a.reshape(-1).view(torch.int64), b.reshape(-1).view(torch.int64))


# --- three ways -------------------------------------------------------------------------------------------------

# Few groups, each with its fill, since every new pattern of sizes compiles its kernels anew: one odd width, one
# of mixed types, one that is too large to be fused, one at odd addresses.
GROUPS = (
    ([Spec(torch.bfloat16, 300, (1023,))], math.nan),
    (
        [
            Spec(torch.bfloat16, 256, (2048,)),
            Spec(torch.float8_e4m3fn, 256, (2048,)),
            Spec(torch.int64, 256),
            Spec(torch.bool, 256, (3,)),
        ],
        0.0,
    ),
    ([Spec(torch.float32, 64, (33,))] * 9, None),
    ([Spec(torch.float8_e4m3fn, 99, (777,), skew=3), Spec(torch.bfloat16, 99, (5,), skew=1)], math.nan),
)


@pytest.mark.parametrize(
    ("page_bytes", "device_pages", "host_pages", "groups"),
    [(PAGE, 22, 8, GROUPS), (12288, 70, 40, GROUPS[:1] + GROUPS[3:])],
    ids=["64KiB", "12KiB"],
)
def test_ring_reference_and_compiled_kernels_agree(page_bytes, device_pages, host_pages, groups):
    chance = random.Random(page_bytes)
    ways = ThreeWays(page_bytes, device_pages, host_pages, device="cuda")
    overflowed = 0
    for turn in range(60):
        specs, fill = groups[turn % len(groups)]
        ways.stash(
            specs,
            None if turn % 12 == 0 else ON_DEVICE,
            device_rows=chance.randint(-2, specs[0].rows + 3),
            device_dtype=torch.int32,
            account=turn % 3,
            host_later=turn % 2 == 1,
        )
        newest = ways.live[-len(specs) :]
        ways.restore(newest, fill, one_tier_at_a_time=turn % 8 == 4)
        while len(ways.live) > 14:
            # Half a group now, the rest of it later.
            chosen = chance.choice(ways.live).group
            group = [entry for entry in ways.live if entry.group == chosen]
            ways.release(group[: (len(group) + 1) // 2])
        if turn == 30:
            ways.grow(7, 5)
        if ways.ring.overflow:
            overflowed += 1
            ways.reset()
    assert overflowed, "the sequence was meant to overflow now and then"
    assert (
        any(tier == "host" for entry in ways.live for tier, _ in entry.expected.pages)
        or ways.ring.peak["host"]
    )
    ways.release(list(ways.live))
    assert ways.pools["triton"].stats().device.in_use == 0


# --- more than 4 GiB --------------------------------------------------------------------------------------------


def test_a_tensor_of_six_gibibytes_keeps_every_byte_on_the_device():
    rows = 6 * GIB // 4096
    x = numbered(rows, 4096)
    pool = PagePool("cuda", PAGE, device_bytes=6 * GIB + GIB // 2)
    pool.release(pool.stash([x[: rows // 12]]))  # the ring no longer starts at 0: the tensor wraps around it
    valid = rows - 3
    tickets = pool.stash([x], rows=torch.tensor(valid, device="cuda"))
    (back,) = pool.restore(tickets)
    line = 4 * GIB // 4096
    for part in (slice(0, 64), slice(line - 64, line + 64), slice(valid - 64, valid)):
        assert same_bytes(back[part], x[part])
    assert same_bytes(back[:valid], x[:valid])
    assert back[valid:].count_nonzero() == 0
    stats = pool.stats()
    assert stats.valid_bytes == valid * 4096
    assert stats.device.in_use == -(-valid * 4096 // PAGE)
    pool.release(tickets)
    assert pool.stats().device.in_use == 0


def test_a_tensor_of_six_gibibytes_keeps_every_byte_in_both_tiers():
    x = numbered(6 * GIB // 4096, 4096)
    pool = PagePool("cuda", PAGE, device_bytes=GIB, host_bytes=5 * GIB)
    tickets = pool.stash([x])
    (back,) = pool.restore(tickets)
    assert same_bytes(back, x)
    stats = pool.stats()
    assert (stats.device.in_use_bytes, stats.host.in_use_bytes) == (GIB, 5 * GIB)
    assert stats.spilled_bytes == 5 * GIB
    assert not stats.overflow
    # What lies in host memory is the tensor's end, in order.
    last = pool.memory.host_slab[-4096:].to("cuda")
    assert torch.equal(last, as_bytes(x[-1]))
    across = pool.memory.host_slab[4 * GIB - 4096 : 4 * GIB + 4096].to("cuda")
    assert torch.equal(across, as_bytes(x)[5 * GIB - 4096 : 5 * GIB + 4096])


# --- pinned memory ----------------------------------------------------------------------------------------------


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_host_pages_are_pinned_at_their_exact_size_and_given_back():
    PagePool("cuda", PAGE, 1, 1)  # whatever the first registration costs
    size = 9601 * PAGE  # just over 600 MB; the caching allocator would take a gibibyte
    gc.collect()
    before = resident_bytes()
    pool = PagePool("cuda", PAGE, 1, host_bytes=size)
    assert pool.memory.host_slab.is_pinned()
    assert pool.memory.host_slab.numel() == size
    taken = resident_bytes() - before
    assert size * 0.97 <= taken <= size * 1.03
    del pool
    gc.collect()
    assert resident_bytes() - before < size * 0.1


def test_growing_keeps_what_is_pinned():
    pool = PagePool("cuda", PAGE, 2, 3)
    x = numbered(5, PAGE)
    tickets = pool.stash([x])
    pool.grow(device_pages=4, host_pages=6)
    assert pool.memory.host_slab.is_pinned()
    y = numbered(5, PAGE, start=10**9)
    more = pool.stash([y])
    for back, expected in zip(pool.restore(tickets + more), (x, y)):
        assert same_bytes(back, expected)


# --- no host in the loop ----------------------------------------------------------------------------------------


def test_host_never_waits_for_the_rows():
    """The count is still being computed when stash, restore and release have long been launched."""
    pool = PagePool("cuda", PAGE, 20, 20)
    x, n = numbered(32, PAGE), torch.zeros((), dtype=torch.int32, device="cuda")

    def work():
        tickets = pool.stash([x], rows=n)
        back = pool.restore(tickets, fill=1.0)
        pool.release(tickets)
        pool.reset()
        return back[0]

    work()  # compiles
    counted = torch.cuda.Event()
    with no_synchronisation():
        torch.cuda._sleep(HOLD)
        n.fill_(29)
        counted.record()
        back = work()
        assert not counted.query()
    assert same_bytes(back[:29], x[:29])
    assert torch.equal(back[29:], torch.ones_like(back[29:]))


@pytest.mark.parametrize("host_pages", [0, 30], ids=["overflowing", "spilling"])
def test_a_captured_graph_follows_the_rows_of_each_replay(host_pages):
    """Two groups held at once; a pool that holds all of it, spills it, or overflows, by the rows of the replay."""
    pool = PagePool("cuda", PAGE, 30, host_pages)
    x, y = numbered(40, PAGE), numbered(40, 3 * 16).clone()
    n = torch.zeros(1, dtype=torch.int64, device="cuda")
    seen_overflow = torch.zeros((), device="cuda")

    def work():
        pool.reset()
        first = pool.stash([x, y], rows=n)
        second = pool.stash([x], rows=n)
        back = pool.restore(first + second)
        pool.release(second)
        pool.release(first)
        seen_overflow.copy_(pool.overflow)
        return back

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        back = work()
    poison = [torch.full_like(as_bytes(tensor), POISON) for tensor in back]
    for replay, rows in enumerate((0, 1, 13, 14, 15, 29, 30, 40, 99, -1, 14, 15, 13)):
        with no_synchronisation():
            n.fill_(rows)
            as_bytes(x).view(torch.int64).add_(1)
            for tensor, octets in zip(back, poison):
                as_bytes(tensor).copy_(octets)
            graph.replay()
        valid = min(max(rows, 0), 40)
        pages_of_y = -(-valid * 48 // PAGE)
        free = 30 + host_pages
        first_fits = valid + pages_of_y <= free
        second_fits = valid <= free - (valid + pages_of_y if first_fits else 0)
        for tensor, source, fits in zip(back, (x, y, x), (first_fits, first_fits, second_fits)):
            expected = source.clone()
            expected[valid if fits else 0 :] = 0
            assert same_bytes(tensor, expected), (replay, rows)
        assert bool(seen_overflow) == (not (first_fits and second_fits)), (replay, rows)
        stats = pool.stats()
        assert (stats.device.in_use, stats.host.in_use, stats.valid_bytes) == (0, 0, 0)
        assert stats.device.wanted == 2 * valid + pages_of_y


def test_overflow_stops_a_fused_optimizer_on_the_device():
    pool = PagePool("cuda", PAGE, 1)
    parameter = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True, capturable=True)
    optimizer.found_inf = pool.overflow
    optimizer.grad_scale = None
    parameter.grad = torch.ones_like(parameter)
    pool.stash([numbered(2, PAGE)])
    optimizer.step()
    assert torch.equal(parameter, torch.ones_like(parameter))
    pool.reset()
    optimizer.step()
    assert not torch.equal(parameter, torch.ones_like(parameter))


def kernels_of(work):
    """Names of the kernels, copies and fills that `work` puts on the device."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return [event.name for event in seen.events() if event.device_type == DeviceType.CUDA]


def test_a_group_of_eight_takes_one_launch_each_way_where_the_profiler_sees_kernels():
    """The bar is a reservation and a copy for each tensor; all of it fits in one kernel."""
    pool = PagePool("cuda", PAGE, 8 * 16)
    tensors = [numbered(256, 4096, start=i << 32) for i in range(8)]
    n = torch.full((), 256, dtype=torch.int32, device="cuda")
    tickets = pool.stash(tensors, rows=n)
    buffers = pool.restore(tickets)
    pool.release(tickets)
    if not kernels_of(lambda: torch.ones(3, device="cuda")):
        pytest.skip("the profiler sees no kernels on this machine")
    held = []
    stashed = kernels_of(lambda: held.extend(pool.stash(tensors, rows=n)))
    restored = kernels_of(lambda: pool.restore_into(held, buffers))
    released = kernels_of(lambda: pool.release(held))
    assert len(stashed) == 1, stashed
    assert len(restored) == 1, restored
    assert len(released) == 1, released
    assert all(same_bytes(*pair) for pair in zip(buffers, tensors))


# --- side streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_back", ["compute", "copies"])
def test_a_spill_beside_compute_is_ordered_by_two_events(held_back):
    """Whichever side is late: the spill starts after the stash, and the buffer is rewritten after the spill."""
    pool = PagePool("cuda", PAGE, 10, 54)
    side = torch.cuda.Stream()
    x, expected = numbered(64, PAGE), numbered(64, PAGE, start=10**9)
    warm = pool.stash([x], host_later=True)
    pool.spill(warm, [x])
    pool.restore(warm)
    pool.release(warm)
    torch.cuda.synchronize()
    pool.memory.host_slab.fill_(POISON)

    stashed, spilled = torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(side):
        if held_back == "copies":
            torch.cuda._sleep(HOLD)
    if held_back == "compute":
        torch.cuda._sleep(HOLD)
    x.copy_(expected)
    tickets = pool.stash([x], host_later=True)
    stashed.record()
    with torch.cuda.stream(side):
        side.wait_event(stashed)
        pool.spill(tickets, [x])
        spilled.record()
    torch.cuda.current_stream().wait_event(spilled)
    x.fill_(math.nan)
    (back,) = pool.restore(tickets)
    assert same_bytes(back, expected)
    assert pool.stats().host.in_use == 54


def test_without_the_second_event_the_buffer_is_spilled_too_late():
    """The test above can fail: a copy held back reads what was written meanwhile."""
    pool = PagePool("cuda", PAGE, 10, 54)
    side = torch.cuda.Stream()
    x = numbered(64, PAGE)
    expected = x.clone()
    warm = pool.stash([x], host_later=True)
    pool.spill(warm, [x])
    pool.release(warm)
    torch.cuda.synchronize()
    tickets = pool.stash([x], host_later=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(HOLD)
        pool.spill(tickets, [x])
    x.fill_(math.nan)
    torch.cuda.synchronize()
    (back,) = pool.restore(tickets)
    assert same_bytes(back[:10], expected[:10])
    assert not same_bytes(back[10:], expected[10:])


@pytest.mark.parametrize("held_back", ["compute", "copies"])
def test_the_host_half_of_a_restore_may_run_ahead_on_a_side_stream(held_back):
    pool = PagePool("cuda", PAGE, 10, 54)
    side = torch.cuda.Stream()
    x = numbered(64, PAGE)
    tickets = pool.stash([x], rows=60)
    for tiers in ("host", "device"):
        pool.restore_into(tickets, pool.buffers(tickets), tiers=tiers)
    buffers = [torch.full_like(x, math.nan)]
    torch.cuda.synchronize()

    started, fetched = torch.cuda.Event(), torch.cuda.Event()
    if held_back == "compute":
        torch.cuda._sleep(HOLD)
    started.record()
    with torch.cuda.stream(side):
        if held_back == "copies":
            torch.cuda._sleep(HOLD)
        side.wait_event(started)
        pool.restore_into(tickets, buffers, tiers="host")
        fetched.record()
    pool.restore_into(tickets, buffers, tiers="device")
    torch.cuda.current_stream().wait_event(fetched)
    copied = buffers[0].clone()
    assert same_bytes(copied[:60], x[:60])
    assert copied[60:].count_nonzero() == 0
