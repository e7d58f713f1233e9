"""Random nets under random policies: the bits of training without a keeper."""

import pytest
from nets import compare
from support.tiers import slow


@pytest.mark.parametrize("first", [0, *slow(10, 20, 30)])
def test_any_policy_gives_the_same_bits(first):
    assert [wrong for seed in range(first, first + 10) if (wrong := compare(seed))] == []


@pytest.mark.parametrize("first", [*slow(500), 508])
def test_and_so_do_steps_that_are_seen_only_where_something_moves(first):
    assert [wrong for seed in range(first, first + 8) if (wrong := compare(seed, steps=6))] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 10_400, 100))
def test_many_more(first):
    assert [wrong for seed in range(first, first + 100) if (wrong := compare(seed))] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20_000, 20_200, 100))
def test_many_more_of_six_steps(first):
    assert [wrong for seed in range(first, first + 100) if (wrong := compare(seed, steps=6))] == []
