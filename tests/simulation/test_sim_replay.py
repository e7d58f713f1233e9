"""The replay of a step: dependencies, bubbles, copies and bytes."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestash.pipeline import partition
from pagestash.pipeline.costs import LayerCost
from pagestash.schedules.plan import SCHEDULES, Action, Plan, in_flight, plans, stages_a_rank
from pagestash.simulation.cluster.cluster import HostLink
from pagestash.simulation.costs.costs import (
    Amount,
    LayerCosts,
    Machine,
    RankCosts,
    StageCosts,
    StepCosts,
)
from pagestash.simulation.replay.programs import Piece, StageProgram, programs_of
from pagestash.simulation.replay.replay import replay, run_step

FAST = HostLink(out=1e15, back=1e15, both=1e15)


def layer(name: str = "layer", *, forward=1.0, inputs=1.0, weights=1.0, **more) -> LayerCosts:
    return LayerCosts(
        name=name,
        forward=Amount(forward),
        backward_input=Amount(inputs),
        backward_weight=Amount(weights),
        **more,
    )


def step(name: str, ranks: int, microbatches: int, layers, *, chunks=None, **more) -> StepCosts:
    """A step in which stage s has the layers `layers(s)`."""
    found = plans(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    parts = [
        RankCosts(
            plan=plan,
            stages=tuple(StageCosts(stage=stage, layers=tuple(layers(stage))) for stage in plan.stages),
        )
        for plan in found
    ]
    return StepCosts(
        ranks=tuple(parts),
        machine=Machine(link=more.get("host", FAST), overlaps_dispatch=more.get("overlap", False)),
    )


# --- dependencies ---


def longest_paths(found: list[Plan], stages: int, seconds, send) -> dict[Action, float]:
    """When each action ends, by the recursion that defines it: a brute-force longest path."""
    before = {own: first for plan in found for first, own in zip(plan.actions, plan.actions[1:])}
    rank_of = {stage: rank for rank, plan in enumerate(found) for stage in plan.stages}
    all_actions = {action for plan in found for action in plan.actions}

    @cache
    def end(action: Action) -> float:
        starts = [end(before[action])] if action in before else [0.0]
        kind, stage, microbatch = action
        source = stage - 1 if kind == "F" else stage + 1
        if kind != "W" and 0 <= source < stages:
            (sender,) = {
                item
                for item in (Action(kind, source, microbatch) for kind in ("F" if kind == "F" else "BI"))
                if item in all_actions
            }
            takes = send[min(stage, source)] if rank_of[stage] != rank_of[source] else 0.0
            starts.append(end(sender) + takes)
        return max(starts) + seconds[kind, stage]

    return {action: end(action) for action in sorted(all_actions)}


@settings(max_examples=60)
@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_action_ends_at_the_end_of_the_longest_path_to_it(name, ranks, times, random):
    ranks = max(ranks, stages_a_rank(name))
    found = plans(name, ranks=ranks, microbatches=times * ranks * 2)
    stages = 1 + max(stage for plan in found for stage in plan.stages)
    seconds = {
        (kind, stage): random.choice([0.25, 0.5, 1.0, 3.0]) for kind in "FBIW" for stage in range(stages)
    }
    # A way carries one message at a time: shorter than any action, none waits for another.
    send = [random.choice([0.0, 0.125]) for _ in range(stages)]
    programs = [
        StageProgram({kind: [Piece("forward", seconds[kind, stage])] for kind in "FBIW"}, {}, send[stage])
        for stage in range(stages)
    ]
    played = run_step([RankCosts(plan=plan) for plan in found], programs, Machine(link=FAST))
    expected = longest_paths(found, stages, seconds, send)
    assert played.seconds == pytest.approx(max(expected.values()))
    for plan, rank in zip(found, played.ranks):
        ends = [span.end for span in rank.spans if span.kind == "forward"]
        assert ends == pytest.approx([expected[action] for action in plan.actions])


def test_a_plan_that_waits_for_itself_is_refused():
    first = Plan((Action("B", 0, 0), Action("F", 0, 0)))
    second = Plan((Action("F", 1, 0), Action("B", 1, 0)))
    program = StageProgram({kind: [Piece("forward", 1.0)] for kind in "FB"})
    with pytest.raises(ValueError, match=r"rank 0 waits for ever before 0B0"):
        run_step([RankCosts(plan=first), RankCosts(plan=second)], [program, program], Machine(link=FAST))


# --- bubbles ---


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (8, 64)])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_equal_stages_leave_the_bubble_of_the_closed_form(name, ranks, microbatches):
    played = replay(step(name, ranks, microbatches, lambda _: [layer()]))
    assert played.seconds == pytest.approx(3 * (microbatches + ranks - 1))
    assert played.bubble() == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(chunks):
    ranks, microbatches = 4, 16
    costs = step("Interleaved1F1B", ranks, microbatches, lambda _: [layer(weights=0.0)], chunks=chunks)
    assert replay(costs).seconds == pytest.approx(2 * microbatches * chunks + 2 * (ranks - 1))


def test_a_split_backward_leaves_a_smaller_bubble():
    one = replay(step("Interleaved1F1B", 4, 16, lambda _: [layer()]))
    other = replay(step("InterleavedZeroBubble", 4, 16, lambda _: [layer()]))
    assert other.seconds < one.seconds
    assert sum(rank.seconds()["weight"] for rank in other.ranks[1:]) > 0


def test_the_slowest_stage_sets_the_pace():
    played = replay(step("1F1B", 4, 32, lambda stage: [layer(forward=2.0 if stage == 2 else 1.0)]))
    assert 32 * 4 + 2 + 4 <= played.seconds <= 32 * 4 + 3 * 4  # and the way to that stage and back


# --- experts ---


def routed() -> LayerCosts:
    return LayerCosts(
        name="moe",
        forward=Amount(1.0, 1.0),
        backward_input=Amount(1.0, 1.0),
        backward_weight=Amount(1.0, 1.0),
        dispatch_seconds=0.75,
        saved={"keep": Amount(100, 1000)},
    )


def test_overlap_hides_communication_behind_the_other_microbatch():
    apart = replay(step("1F1B", 2, 16, lambda _: [routed()] * 2))
    beside = replay(step("1F1B", 2, 16, lambda _: [routed()] * 2, overlap=True))
    assert 16 * 2 * 6.0 < beside.seconds < apart.seconds
    for rank in beside.ranks:
        for lane in (("forward", "backward"), ("dispatch", "combine")):
            spans = sorted((s.start, s.end) for s in rank.spans if s.kind in lane)
            assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(spans))


# --- bytes ---


@pytest.mark.parametrize("name", SCHEDULES)
def test_peaks_are_those_of_the_partition(name):
    chunks = stages_a_rank(name)
    costs = [
        LayerCost(name=f"{at}", parameters=0, activations=1000 + at, forward=1.0, backward=2.0)
        for at in range(8 * chunks)
    ]
    placed = partition(costs, 4 * chunks, name, microbatches=16)
    played = replay(
        step(name, 4, 16, lambda stage: [layer(saved={"keep": Amount(placed.stages[stage].activations)})])
    )
    assert [rank.peak_bytes for rank in played.ranks] == list(placed.peaks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_is_left_when_the_step_is_over(name):
    own = layer(
        saved={"keep": Amount(10, 5), "offload": Amount(100, 50)},
        workspace=7,
    )
    played = replay(step(name, 2, 8, lambda _: [own, own]))
    assert [rank.memory[-1][1] for rank in played.ranks] == [0, 0]
    assert min(size for rank in played.ranks for _, size in rank.memory) == 0


def test_offload_frees_what_is_in_flight_but_the_window():
    moved = {"keep": Amount(10), "offload": Amount(100)}
    played = replay(step("1F1B", 8, 16, lambda _: [layer(saved=moved)]))
    for at, rank in enumerate(played.ranks):
        assert rank.peak_bytes <= 10 * in_flight(rank.plan)[at] + 3 * 100
    assert played.ranks[0].host_bytes >= 600
    assert played.ranks[-1].host_bytes == 0  # each backward follows its forward at once


# --- links ---


def copies(rank) -> list:
    return [span.end - span.start for span in rank.spans if span.kind in ("out", "back")]


def test_both_directions_at_once_are_slower():
    both = replace(FAST, out=100.0, back=100.0, both=50.0)
    costs = step("1F1B", 4, 16, lambda _: [layer(saved={"offload": Amount(200)})] * 4, host=both)
    assert (
        replay(costs).seconds
        > replay(replace(costs, machine=Machine(link=replace(both, both=100.0)))).seconds
    )


def test_a_slow_link_makes_the_step_wait_and_a_fast_one_does_not():
    moved = {"offload": Amount(100)}

    def seconds(rate: float) -> float:
        host = replace(FAST, out=rate, back=rate, both=rate)
        return replay(step("1F1B", 4, 16, lambda _: [layer(saved=moved)] * 4, host=host)).seconds

    times = [seconds(rate) for rate in (20.0, 50.0, 100.0, 200.0, 1e6)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(3 * 4 * (16 + 3), rel=1e-3)
    assert times[0] > 1.5 * times[-1]


# --- cost ---


@pytest.mark.parametrize("moved", [0, 100])
def test_the_cost_grows_with_the_events(moved):
    def events(microbatches: int, layers: int) -> int:
        own = [layer(saved={"offload": Amount(moved)}) for _ in range(layers)]
        return replay(step("Interleaved1F1B", 4, microbatches, lambda _: own)).events

    few = events(16, 2)
    assert events(32, 2) <= 2.1 * few
    assert events(16, 4) <= 2.1 * few
    assert few <= 4 * 16 * 2 * 2 * 2 * 8  # ranks, microbatches, stages, ways, layers, and a few for each


# --- programs ---


def test_a_first_stage_has_all_of_its_backward_in_the_second_half():
    programs = programs_of(step("1F1B", 2, 2, lambda _: [routed()] * 3).stages)
    assert programs[0].pieces["I"] == []
    assert programs[0].pieces["W"] == programs[0].pieces["B"]


def test_groups_leave_with_their_region():
    moved = {"offload": Amount(100, 50)}
    program = programs_of(step("1F1B", 2, 2, lambda _: [layer(saved=moved)]).stages)[1]
    assert program.groups == {"1": 100, "1.rows": 50}
    assert [piece.puts for piece in program.pieces["F"]] == [("1",), ("1.rows",)]
    assert program.pieces["B"][0].gets == ("1.rows", "1")


def test_groups_return_one_ahead_as_in_megatron():
    costs = step("1F1B", 4, 16, lambda _: [layer(saved={"offload": Amount(50)})] * 4)
    link = HostLink(out=100.0, back=100.0, both=100.0)
    slow = replace(costs, machine=Machine(link=link, margin="last"))
    played = replay(slow)
    plain = replay(costs).seconds
    assert plain < played.seconds < 1.1 * plain
    for rank in played.ranks:
        assert rank.memory[-1][1] == 0
        assert sum(span.kind == "out" for span in rank.spans) == 16 * 4
    # Only a backward that follows its forward at once has to wait for what it has just sent away.
    assert played.ranks[-1].seconds()["wait"] > 10 * played.ranks[0].seconds().get("wait", 0.0)
