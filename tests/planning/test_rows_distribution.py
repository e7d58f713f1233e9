"""Received rows as a distribution, the pool that their sum needs, and how often that pool is too small."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import slow

from pagestash.row_counts.distribution import RowDistribution
from pagestash.row_counts.pool import expected_rows_for, overflow_probability, pool_for
from pagestash.row_counts.sums import Amount, Sum
from pagestash.row_counts.tokens_per_expert import read_tokens_per_expert

QUICK = settings(max_examples=12, deadline=None, derandomize=True)
COUNTS = st.lists(st.integers(0, 5000), min_size=1, max_size=40).filter(any)


def simulated(distribution, live, steps=100_000, seed=1, beyond=0.0):
    """For each of so many steps the sum over live pairs of what exceeds `beyond`, by plain sampling."""
    generator = np.random.default_rng(seed)
    values, weights = np.array(distribution.values), np.array(distribution.weights)
    total = np.zeros(steps)
    edges = np.cumsum(weights)
    for _ in range(live):
        at = np.searchsorted(edges, generator.random(steps) * edges[-1], side="right")
        total += np.maximum(0.0, values[at] - beyond)
    return total


def of_a_tail(probability, steps=100_000):
    """Five standard deviations of a probability that is counted in so many steps, relative to it."""
    return 5 * math.sqrt((1 - probability) / (probability * steps))


# --- the distribution ---


@QUICK
@given(counts=COUNTS)
def test_measured_rows_say_what_was_counted(counts):
    found = RowDistribution.measured(counts)
    assert found.mean == pytest.approx(1.0)
    assert found.average == pytest.approx(np.mean(counts))
    assert found.deviation == pytest.approx(np.std(counts) / np.mean(counts), abs=1e-9)
    assert found.max_over_mean(10**6) == pytest.approx(max(counts) / np.mean(counts), rel=1e-3)
    assert found.max_over_mean(1) == pytest.approx(1.0)
    for part in (0.1, 0.5, 0.9):
        wanted = np.quantile(counts, part, method="inverted_cdf") / np.mean(counts)
        assert found.quantile(part) == pytest.approx(wanted)
    middle = found.quantile(0.5)
    relative = np.array(counts) / np.mean(counts)
    assert found.above(middle) == pytest.approx(np.mean(relative > middle + 1e-12))
    assert found.excess(middle) == pytest.approx(np.mean(np.maximum(0, relative - middle)))


@pytest.mark.parametrize(
    ("skew", "draws"), [(1.02, 8), (1.2, 64), (1.5, 64), (3.0, 64), (3.0, 12), (4.0, 2000)]
)
def test_a_log_normal_has_the_stated_max_over_mean(skew, draws):
    found = RowDistribution.log_normal(skew, draws=draws)
    assert found.mean == pytest.approx(1.0)
    assert found.max_over_mean(draws) == pytest.approx(skew, rel=1e-6)
    # And so has the log-normal of that variance, drawn by another generator.
    sigma = math.sqrt(math.log1p(found.deviation**2))
    drawn = np.random.default_rng(0).lognormal(-(sigma**2) / 2, sigma, (2000, draws)).max(axis=1)
    assert skew == pytest.approx(drawn.mean(), abs=5 * drawn.std() / math.sqrt(len(drawn)))
    # Its cells are as fine as 0.7 % of a deviation of the logarithm.
    assert found.quantile(0.999) == pytest.approx(math.exp(3.0902 * sigma - sigma**2 / 2), rel=0.02 * sigma)


def test_an_even_load_is_one_value():
    even = RowDistribution.log_normal(1.0)
    assert (even.values, even.weights, even.deviation) == ((1.0,), (1.0,), 0.0)
    assert even.max_over_mean(1000) == 1.0
    assert pool_for(even, 48, 1000, average_rows=4096) == 48 * 1000 * 4096
    assert pool_for(even, 48, 1000, average_rows=4096, expected_rows=4096) == 0
    assert overflow_probability(even, 48, 1000, 48 * 1000 * 4096, average_rows=4096) == 0.0
    assert overflow_probability(even, 48, 1000, 48 * 1000 * 4096 - 1, average_rows=4096) == 1.0
    assert expected_rows_for(even, 48, average_rows=4096) == 4096


def test_a_fit_keeps_mean_and_variance_and_has_a_tail():
    counts = [900, 1000, 1000, 1200, 800, 1100]
    found = RowDistribution.measured(counts)
    fitted = found.fitted()
    assert fitted.mean == pytest.approx(1.0)
    assert fitted.deviation == pytest.approx(found.deviation, rel=1e-3)
    assert found.above(1.25) == 0.0 < fitted.above(1.25)
    assert fitted.average == found.average == 1000.0
    even = RowDistribution.measured([7, 7])
    assert even.fitted() == even


# --- sums ---


@pytest.mark.parametrize("live", [1, 12, *slow(2, 60)])
@pytest.mark.parametrize(("skew", "expected"), [(1.2, 0.0), (1.5, 1.25), (3.0, 0.75)])
def test_a_pool_overflows_as_often_as_it_says(live, skew, expected):
    skewed = RowDistribution.log_normal(skew)
    row_bytes, rows, beyond = 100, 1000, 1000 * expected
    total = row_bytes * rows * simulated(skewed, live, beyond=expected)
    step = (16 * total.std() + row_bytes * rows * skewed.values[-1]) / 1920  # of the grid
    for overflow in (0.1, 0.01, 1e-3):
        pool = pool_for(skewed, live, row_bytes, average_rows=rows, expected_rows=beyond, overflow=overflow)
        told = overflow_probability(skewed, live, row_bytes, pool, average_rows=rows, expected_rows=beyond)
        assert told <= overflow
        assert np.mean(total > pool) <= overflow * (1 + of_a_tail(overflow))
        if pool:  # and with two steps less it would be too small
            assert np.mean(total > pool - 2 * step) >= overflow * (1 - of_a_tail(overflow))
            less = overflow_probability(
                skewed, live, row_bytes, pool - 2 * step, average_rows=rows, expected_rows=beyond
            )
            assert less > overflow


def test_few_measured_counts_are_summed_exactly():
    coin = RowDistribution.measured([1000, 3000])
    # Of 10 layers, k receive 3000: more than 8 of them in 11 of 1024 steps, and 10 in one.
    pool = pool_for(coin, 10, 1, overflow=12 / 1024)
    assert pool == pytest.approx(8 * 3000 + 2 * 1000, rel=1e-3)
    for most, steps in ((7, 56), (8, 11), (9, 1), (10, 0)):
        bytes_of_most = most * 3000 + (10 - most) * 1000
        assert overflow_probability(coin, 10, 1, bytes_of_most + 500) == pytest.approx(steps / 1024, abs=1e-9)
    assert pool_for(coin, 10, 1, overflow=1e-7) == 30_000  # the most that can be


def test_amounts_of_several_kinds_are_summed():
    kinds = [Amount([0.0, 1.0], [0.5, 0.5], 3), Amount([10.0, 20.0], [0.9, 0.1], 2), Amount([5.0], [1.0], 1)]
    found = Sum(kinds)
    assert (found.mean, found.least, found.most) == (pytest.approx(28.5), 25.0, 48.0)
    assert found.above(45.5) == pytest.approx(0.01 * 0.875, abs=1e-9)  # both twenties, and one of three ones
    assert found.above(46.5) == pytest.approx(0.01 * 0.5, abs=1e-9)
    assert found.above(47.5) == pytest.approx(0.01 * 0.125, abs=1e-9)


@QUICK
@given(counts=COUNTS, live=st.integers(1, 30), overflow=st.sampled_from([0.2, 0.01, 1e-4]))
def test_more_pairs_and_fewer_overflows_take_more(counts, live, overflow):
    found = RowDistribution.measured(counts)
    pool = pool_for(found, live, 8, overflow=overflow)
    assert live * 8 * min(counts) <= pool <= live * 8 * max(counts) + 1
    step = 1e-3 * pool + 1  # a grid has steps
    assert pool_for(found, live + 1, 8, overflow=overflow) >= pool - step
    assert pool_for(found, live, 8, overflow=overflow / 10) >= pool - step
    assert pool_for(found, live, 8, overflow=overflow, expected_rows=found.average) <= pool + step
    assert overflow_probability(found, live, 8, pool) <= overflow


def test_pairs_that_receive_the_same_need_more():
    skewed = RowDistribution.log_normal(1.5)
    apart = pool_for(skewed, 64, 100, average_rows=1000)
    together = pool_for(skewed, 64, 100, average_rows=1000, alike=8)
    assert apart < together == pool_for(skewed, 8, 800, average_rows=1000)
    # 65 pairs of which 8 are alike: eight lots of 8, and one pair more.
    assert together < pool_for(skewed, 65, 100, average_rows=1000, alike=8) < together * 65 / 64 * 1.01


def test_any_of_several_chances_reruns_the_step():
    skewed = RowDistribution.log_normal(1.5)
    pool = pool_for(skewed, 16, 100, average_rows=1000, chances=8)
    one = overflow_probability(skewed, 16, 100, pool, average_rows=1000)
    assert overflow_probability(skewed, 16, 100, pool, average_rows=1000, chances=8) == pytest.approx(
        1 - (1 - one) ** 8
    )
    assert one <= 1e-3 / 8 * 1.001


def test_no_more_rows_than_the_capacity_are_received():
    skewed = RowDistribution.log_normal(3.0)
    assert pool_for(skewed, 4, 100, average_rows=1000, capacity=1100, overflow=1e-6) == 4 * 1100 * 100
    assert pool_for(skewed, 4, 100, average_rows=1000, capacity=1100, expected_rows=1100) == 0


# --- expected rows ---


@pytest.mark.parametrize("skew", [1.1, 1.5, 3.0])
def test_expected_rows_are_the_most_that_cost_next_to_nothing(skew):
    skewed = RowDistribution.log_normal(skew)

    def held(rows):
        pool = pool_for(skewed, 12, 10, average_rows=10_000, expected_rows=rows)
        return pool + 12 * 10 * rows

    best = expected_rows_for(skewed, 12, average_rows=10_000, slack=0.02)
    # Head plus pool never falls with the rows that are expected.
    sizes = [held(rows) for rows in range(0, 20_000, 1000)]
    assert all(larger >= 0.999 * smaller for smaller, larger in pairwise(sizes))
    assert held(best) == pytest.approx(1.02 * held(0), rel=2e-3)
    assert held(best + 200) > 1.02 * held(0)
    assert expected_rows_for(skewed, 12, average_rows=10_000, slack=0.2) > best


# --- files ---


def record(layer=3, tpe=((128, 64), (96, 80)), **more):
    return json.dumps({"iter": 100, "block": "decoder", "layer": layer, "tpe": tpe, **more}) + "\n"


def test_a_file_of_one_rank_gives_the_rows_of_each_layer_and_microbatch(tmp_path):
    file = tmp_path / "rank0.jsonl"
    file.write_text(record() + "\n" + record(4, [[10, 0]], block="mtp", mtp_idx=0))
    found = read_tokens_per_expert(file)
    assert found.average == pytest.approx((192 + 176 + 10) / 3)
    assert [round(value * found.average) for value in found.values] == [10, 176, 192]
    even = read_tokens_per_expert(file, average=126)
    assert even.values[-1] == pytest.approx(192 / 126)


def test_experts_of_one_list_are_divided_among_ranks_in_order(tmp_path):
    file = tmp_path / "all.jsonl"
    file.write_text(record(tpe=[[1, 2, 3, 4, 5, 6]]))
    found = read_tokens_per_expert(file, ep=3)
    assert [round(value * found.average) for value in found.values] == [3, 7, 11]
    assert found.mean == pytest.approx(1.0)


def test_a_folder_has_a_file_for_every_rank(tmp_path):
    for rank, tokens in enumerate(([30, 10], [5, 15])):
        (tmp_path / f"rank{rank}.jsonl").write_text(record(tpe=[tokens]))
    found = read_tokens_per_expert(tmp_path)
    assert found.average == 30
    assert found.values == pytest.approx((20 / 30, 40 / 30))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no records: expected lines like"),
        (record(tpe=[]), "no records"),
        (record(tpe=[[0, 0]]), "all counts are 0"),
        ("{not json}\n", ":1: expected a record like"),
        (record() + "[1, 2]\n", ":2: expected a record like"),
        ('{"iter": 1}\n', ":1: expected a record like"),
        (record(tpe=[[1, -2]]), "[1, -2]: expected for each microbatch a list of counts"),
        (record(tpe=[[1.5]]), "expected for each microbatch"),
        (record(tpe=[[True]]), "expected for each microbatch"),
        (record(tpe=[[]]), "expected for each microbatch"),
        (record(tpe=[7]), "'tpe' has 7: expected"),
        (record(tpe=[[1, 2, 3]]), "3 experts cannot be divided among ep=2 ranks"),
        ("[" * 10**5, ":1: expected a record like"),
    ],
)
def test_a_malformed_file_is_one_sentence(text, says, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"rows\.jsonl") as error:
        read_tokens_per_expert(file, ep=2)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_file_of_text_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"none\.jsonl: No such file"):
        read_tokens_per_expert(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"the folder has no \.jsonl files"):
        read_tokens_per_expert(tmp_path)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="this is no text"):
        read_tokens_per_expert(tmp_path / "bytes.jsonl")


# --- what makes no sense ---

SKEWED = RowDistribution.log_normal(1.5)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RowDistribution.measured([]), "no row counts"),
        (lambda: RowDistribution.measured([0, 0]), "all row counts are 0"),
        (lambda: RowDistribution.measured([1, -1]), "rows=-1: expected 0 or more"),
        (lambda: RowDistribution.measured([math.nan]), "rows=nan: expected a number"),
        (lambda: RowDistribution.measured([1], average=0), "average=0: expected more than 0 rows"),
        (lambda: RowDistribution((1.0,), ()), "1 values and 0 weights"),
        (lambda: RowDistribution((2.0, 1.0), (0.5, 0.5)), "not ascending"),
        (lambda: RowDistribution((1.0, 2.0), (0.5, 0.4)), "whose sum is 1"),
        (lambda: RowDistribution((-1.0, 2.0), (0.5, 0.5)), "negative"),
        (lambda: RowDistribution.log_normal(0.9), "max/mean=0.9: the most is never below the mean"),
        (lambda: RowDistribution.log_normal("big"), "max/mean='big': expected a number"),
        (lambda: RowDistribution.log_normal(math.inf), "max/mean=inf: expected a number"),
        (lambda: RowDistribution.log_normal(90, draws=64), "expected at most"),
        (lambda: RowDistribution.log_normal(1.5, draws=1), "expected at most 1 over 1 draws"),
        (lambda: RowDistribution.log_normal(1.5, draws=0), "draws=0: expected a count"),
        (lambda: SKEWED.quantile(1.0), "quantile=1: expected a probability between 0 and 1"),
        (lambda: pool_for(SKEWED, 8, 100), "the distribution is relative"),
        (lambda: pool_for(SKEWED, 8, 100, average_rows=0), "average_rows=0"),
        (lambda: pool_for(SKEWED, 0, 100, average_rows=10), "live=0: expected a count of 1 or more"),
        (lambda: pool_for(SKEWED, 8, 0, average_rows=10), "row_bytes=0"),
        (lambda: pool_for(SKEWED, 8, 1, average_rows=10, overflow=0), "overflow=0: expected a probability"),
        (
            lambda: pool_for(SKEWED, 8, 1, average_rows=10, overflow=1.5),
            "overflow=1.5: expected a probability",
        ),
        (lambda: pool_for(SKEWED, 8, 1, average_rows=10, chances=0), "chances=0"),
        (lambda: pool_for(SKEWED, 8, 1, average_rows=10, expected_rows=-1), "expected_rows=-1"),
        (lambda: expected_rows_for(SKEWED, 8, average_rows=10, slack=-1), "slack=-1"),
        (lambda: read_tokens_per_expert("x", ep=0), "ep=0: expected a count of ranks"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(make, says):
    with pytest.raises(ValueError, match=r".") as error:
        make()
    assert says in str(error.value)
    assert "\n" not in str(error.value)
