"""Expected rows from rows that were received: head, pool, and the probability of a rerun."""

import pytest
import torch

from pagestash.row_counts.distribution import RowDistribution
from pagestash.saved.expected_rows import CANDIDATES, ENOUGH, SLACK, StepRows
from pagestash.saved.received_rows import ReceivedRows, RowsRecording

PAGE, ROW = 1024, (512, 256)
ROW_BYTES = sum(ROW)
LAYERS = 6


def step(layers=LAYERS, microbatches=1, together=True, gradient_bytes=0, head_bytes=ROW_BYTES):
    """A recorded step: all forwards and then all backwards, or so for each microbatch."""
    recording, found = RowsRecording(), [ReceivedRows() for _ in range(layers)]
    for microbatch_group in [range(microbatches)] if together else [[m] for m in range(microbatches)]:
        endings = [
            recording.begin(layer, ROW, head_bytes, gradient_bytes)
            for _ in microbatch_group
            for layer in found
        ]
        for ending in reversed(endings):
            ending.tell()
    return recording


def skewed(steps, width=LAYERS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (1000 * torch.exp(0.5 * torch.randn(steps, width, generator=generator))).to(torch.int64)


def pages(rows):
    return sum(-(-rows * size // PAGE) for size in ROW)


def test_the_choice_is_the_most_rows_within_the_slack_of_the_smallest():
    received = skewed(40)
    found = StepRows(step(), received, PAGE)
    held = {}
    for rows in range(0, 4000, 25):
        held[rows] = found.choice(rows, found.needs([rows], 1e-3)[0]).held_bytes
    chosen = found.choose(1e-3)
    assert chosen.held_bytes <= (1 + SLACK) * min(held.values())
    larger = [rows for rows in held if rows > chosen.rows + int(received.max()) / CANDIDATES]
    assert all(held[rows] > (1 + SLACK) * min(held.values()) for rows in larger)
    assert found.choose(1e-3, slack=0.0).rows <= chosen.rows <= found.choose(1e-3, slack=0.5).rows


def test_an_even_load_is_expected_whole_and_needs_no_page():
    chosen = StepRows(step(), torch.full((20, LAYERS), 1000), PAGE).choose(1e-3)
    assert (chosen.rows, chosen.pages) == (1000, 0)
    assert chosen.held_bytes == LAYERS * 1000 * sum(ROW)


def test_pages_are_those_of_the_peak_of_a_step():
    rows = skewed(3)
    for made, count in ((step(), 1), (step(microbatches=2), 2), (step(microbatches=2, together=False), 1)):
        waiting = len(made.waiting)
        found = StepRows(made, rows.repeat(1, waiting // LAYERS), PAGE)
        most = max(sum(pages(max(0, int(each) - 700)) for each in one) for one in rows)
        assert found.most_pages(700) == count * most
        assert found.choice(700, 0).head_bytes == count * LAYERS * 700 * sum(ROW)


def test_the_quantile_is_that_of_a_log_normal_with_the_moments_of_the_steps():
    rows = skewed(64)
    found = StepRows(step(), rows, PAGE)
    sums = [sum(pages(int(each)) for each in one) for one in rows]
    fitted = RowDistribution.measured(sums).fitted()
    assert found.needs([0], 1e-3)[0] == pytest.approx(fitted.average * fitted.quantile(0.999), rel=0.03)
    assert found.overflows(0, found.needs([0], 1e-3)[0]) == pytest.approx(1e-3, rel=0.1)


def test_as_few_steps_overflow_as_stated():
    found = StepRows(step(), skewed(64), PAGE)
    chosen = found.choose(1e-2)
    later = skewed(20_000, seed=1)
    exceeded = StepRows(step(), later, PAGE)
    sums = ((later - chosen.rows).clamp(min=0)[:, :, None] * torch.tensor(ROW) + PAGE - 1) // PAGE
    assert float((sums.sum((1, 2)) > chosen.pages).double().mean()) < 3e-2
    assert exceeded.overflows(chosen.rows, chosen.pages) < 3e-2


def test_sums_that_do_not_vary_need_no_more_than_they_were():
    """What one layer has more, another has less: that shows after some steps."""
    rows = skewed(40).double()
    rows = (rows / rows.sum(1, keepdim=True) * LAYERS * 1000).round().to(torch.int64)
    few, many = (StepRows(step(), rows[:steps], PAGE) for steps in (2, 40))
    assert 2 < ENOUGH <= 40
    assert many.needs([0], 1e-3)[0] < 1.05 * many.most_pages(0)
    assert few.needs([0], 0.05)[0] > 1.2 * few.most_pages(0)


def test_a_head_below_the_gradients_that_follow_it_is_free():
    rows = skewed(40)
    without = StepRows(step(), rows, PAGE).choose(1e-3, slack=0.0)
    gradient = 800 * sum(ROW)
    found = StepRows(step(gradient_bytes=gradient), rows, PAGE)
    assert found.choice(0, 0).held_bytes == found.choice(800, 0).held_bytes == LAYERS * gradient
    assert found.choose(1e-3, slack=0.0).rows > without.rows


def test_gradients_of_the_first_microbatch_stay_for_the_second():
    made = step(microbatches=2, together=False, gradient_bytes=10_000)
    found = StepRows(made, skewed(4).repeat(1, 2), PAGE)
    assert found.choice(100, 0).held_bytes == LAYERS * (10_000 + 100 * sum(ROW))


def test_rows_that_leave_for_the_host_are_expected_rather():
    rows = skewed(40)
    stay, leave = (StepRows(step(head_bytes=size), rows, PAGE) for size in (sum(ROW), sum(ROW) // 4))
    assert leave.choose(1e-3).rows > stay.choose(1e-3).rows


def test_a_given_pool_gets_the_least_rows_with_which_it_suffices():
    found = StepRows(step(), skewed(40), PAGE)
    for room in (0, 500, 2000, 10**6):
        chosen = found.least_for(room, 1e-3)
        assert found.needs([chosen.rows], 1e-3)[0] <= room
        fewer = chosen.rows - 1 - int(skewed(40).max()) // 64
        assert chosen.rows == 0 or found.needs([max(0, fewer)], 1e-3)[0] > room
