"""Random operation sequences: the plain-Python ring, the torch reference and the kernels agree at every step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import slow, sweep
from three_way import ON_DEVICE, Spec, ThreeWays

pytest.importorskip("triton")

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool)

specs = st.builds(
    Spec,
    dtype=st.sampled_from(DTYPES),
    capacity=st.one_of(st.none(), st.integers(0, 6)),
    row=st.sampled_from([(), (1,), (3,), (5,), (7,), (0,), (2, 3)]),
    skew=st.sampled_from([0, 0, 0, 1, 3]),
)
groups = st.one_of(st.lists(specs, min_size=1, max_size=4), st.lists(specs, min_size=9, max_size=10))
one_row_count = st.one_of(st.none(), st.integers(0, 7), st.just(ON_DEVICE))
row_counts = st.one_of(one_row_count, st.lists(one_row_count, min_size=10, max_size=10))
picks = st.lists(st.integers(0, 63), min_size=1, max_size=10)

stashes = st.tuples(
    st.just("stash"),
    groups,
    row_counts,
    st.integers(-2, 9),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([0, 0, 3]),
    st.booleans(),
)
restores = st.tuples(st.just("restore"), picks, st.sampled_from([0.0, None, math.nan]), st.booleans())
releases = st.tuples(st.just("release"), picks)
operations = st.one_of(
    stashes,
    stashes,
    stashes,
    restores,
    releases,
    st.tuples(st.just("release all")),
    st.tuples(st.just("grow"), st.integers(0, 5), st.integers(0, 3)),
    st.tuples(st.just("reset")),
)
pools = st.tuples(st.sampled_from([16, 48, 64, 256]), st.integers(0, 12), st.integers(0, 6)).filter(
    lambda pool: pool[1] + pool[2] > 0
)


def play(pool, sequence):
    ways = ThreeWays(*pool)
    for operation, *arguments in sequence:
        if operation == "stash":
            stash(ways, *arguments)
        elif operation in ("restore", "release") and ways.live:
            chosen, *rest = arguments
            # Out of order, across groups, and parts of groups.
            entries = list(dict.fromkeys(ways.live[pick % len(ways.live)] for pick in chosen))
            if operation == "restore":
                ways.restore(entries, rest[0], one_tier_at_a_time=rest[1])
            else:
                ways.release(entries)
        elif operation == "release all":
            ways.release(list(ways.live))
        elif operation == "grow":
            ways.grow(*arguments)
        elif operation == "reset":
            ways.reset()
    ways.restore(list(ways.live))
    # Recovery: whatever happened, an empty pool serves again, first an overflow and then all it has.
    ways.release(list(ways.live))
    ways.reset()
    total = sum(ways.ring.total.values())
    page = Spec(torch.uint8, total + 1, (ways.page_bytes,))
    refused = ways.stash([page])
    assert ways.ring.overflow
    ways.restore(refused, None)
    whole = ways.stash([page], total)
    assert whole[0].expected.granted
    ways.release(refused)
    ways.release(whole)
    assert ways.pools["triton"].stats().device.in_use == 0


def stash(ways, group, rows, device_rows, device_dtype, account, host_later):
    if isinstance(rows, list):
        rows = [min(n, spec.rows) if isinstance(n, int) else n for n, spec in zip(rows, group)]
    elif isinstance(rows, int):
        rows = min(rows, *(spec.rows for spec in group), rows)
    ways.stash(
        group,
        rows,
        device_rows=device_rows,
        device_dtype=device_dtype,
        account=account,
        host_later=host_later,
    )


@sweep(6, 40, pools, st.lists(operations, min_size=6, max_size=9))
def test_ring_reference_and_kernels_agree_on_random_sequences(pool, sequence):
    play(pool, sequence)


@pytest.mark.slow
@settings(max_examples=250, derandomize=False)
@given(pools, st.lists(operations, min_size=3, max_size=25))
def test_ring_reference_and_kernels_agree_on_long_random_sequences(pool, sequence):
    play(pool, sequence)


@pytest.mark.parametrize("page_bytes", [16, *slow(48)])
def test_ring_wraps_many_times_over(page_bytes):
    """Five device and three host pages, 30 groups of three pages, two live at a time: some eleven turns."""
    ways = ThreeWays(page_bytes, 5, 3)
    group = [Spec(torch.uint8, page_bytes, (2,)), Spec(torch.uint8, page_bytes + 5)]
    for turn in range(30):
        ways.stash(group, ON_DEVICE, device_rows=page_bytes - turn % 3)
        if len(ways.live) > 2:
            # The older group first, or the tensors of both interleaved.
            ways.release(ways.live[:2] if turn % 2 else [ways.live[3], ways.live[0]])
        if len(ways.live) > 2 and turn % 5 == 0:
            ways.restore(ways.live)
    assert ways.ring.spilled > 0
    ways.release(list(ways.live))
    assert ways.expected_stats().device.in_use == 0
