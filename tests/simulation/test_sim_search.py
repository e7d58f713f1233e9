"""The search of layouts and policies."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pagestash.cli import app
from pagestash.models.config import preset
from pagestash.policy import Policy, Rule
from pagestash.simulation.cluster.cluster import read_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.build import Known, step_costs
from pagestash.simulation.model.homes import PolicyHomes
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.run import Run
from pagestash.simulation.replay.lengthened import step_seconds
from pagestash.simulation.replay.replay import replay
from pagestash.simulation.search.homes import choices_of, joined, plan_homes
from pagestash.simulation.search.layouts import Bounded, Wanted, bounded, least_seconds, runs
from pagestash.simulation.search.search import search, try_layout

GIB = 1 << 30
TOLERANCE = 1.02
"""Of steps with more memory, over those with less: waits for copies are estimates until the replay."""


def run(devices="h100:32", *, layers=16, global_batch=128, **layout) -> Run:
    cluster = read_cluster(devices)
    return Run(
        config=preset("deepseek-v3", layers),
        cluster=cluster,
        layout=Layout(devices=cluster.devices, **layout),
        sequence=4096,
        global_batch=global_batch,
    )


PIPED = {"pp": 4, "ep": 8}


def with_room(made: Run, size: int) -> Run:
    """On devices of so many bytes, all of which may be used."""
    device = replace(made.cluster.device, memory=size)
    return replace(made, cluster=replace(made.cluster, device=device), reserve=0.0)


def most_bytes(made: Run) -> int:
    return max(rank.device_bytes for rank in step_costs(made).ranks)


def test_homes_fit_what_they_are_planned_for():
    made = run(**PIPED)
    for less in (2, 4, 6):
        room = most_bytes(made) - less * GIB
        for planned in plan_homes(with_room(made, room)):
            assert planned.lacks == 0
            assert max(rank.device_bytes for rank in planned.costs.ranks) <= room
            assert any(policy.rules for policy in planned.policies)


def test_the_ranks_policies_say_what_was_planned():
    made = run(**PIPED)
    planned = plan_homes(with_room(made, most_bytes(made) - 4 * GIB))[0]
    again = step_costs(replace(made, homes=PolicyHomes(joined(planned.policies))))
    assert [rank.device_bytes for rank in again.ranks] == [r.device_bytes for r in planned.costs.ranks]
    regions = [f"{layer.name}.{part.name}" for layer in layers_of(made) for part in layer.parts]
    names = [layer.name for layer in layers_of(made)]
    for policy in planned.policies:
        policy.check([*regions, *names])


def test_what_fits_needs_no_policy():
    (planned,) = plan_homes(with_room(run(**PIPED), 1 << 42))
    assert [policy.rules for policy in planned.policies] == [()] * 4


def test_what_fits_with_no_policy_is_said_to_lack():
    assert all(planned.lacks_bytes > 0 for planned in plan_homes(with_room(run(**PIPED), 1 * GIB)))


LAYOUTS = [PIPED, {"pp": 2, "ep": 8, "vpp": 2, "schedule": "Interleaved1F1B"}]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_memory_is_not_slower_for_a_layout(layout):
    made = run(**layout)
    most = most_bytes(made)
    times = []
    for less in range(0, 18, 3):
        found = try_layout(Bounded(with_room(made, most - less * GIB), seconds=0.0, static=0))
        if found is not None and found.played is not None:
            times.append(found.seconds)
    assert len(times) > 2
    assert all(less >= more / TOLERANCE for more, less in pairwise(times))


def with_memory(made: Run, size: int) -> Run:
    device = replace(made.cluster.device, memory=size)
    return replace(made, cluster=replace(made.cluster, device=device))


SMALL = run("h100:16", layers=8, global_batch=32)


@cache
def searched(size: int) -> float:
    """The step that a search finds on devices of so many bytes; infinite if nothing fits."""
    made = with_memory(SMALL, size)
    try:
        return search(Wanted(base=made, microbatches=(1,))).best.seconds
    except ValueError:
        return float("inf")


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.integers(45 * GIB, 140 * GIB), st.integers(1, 30 * GIB))
def test_more_memory_is_not_slower_for_a_search(size, more):
    assert searched(size + more) <= TOLERANCE * searched(size)


@pytest.mark.slow
def test_memory_buys_time_in_that_search():
    assert searched(60 * GIB) > searched(200 * GIB)
    assert searched(200 * GIB) == searched(300 * GIB) < float("inf")


@pytest.mark.slow
def test_a_search_looks_at_the_same_layouts_whatever_the_memory():
    found = []
    for size in (40 * GIB, 80 * GIB, 400 * GIB):
        made = with_memory(SMALL, size)
        items = bounded(Wanted(base=made))
        found.append([(item.run.layout, item.run.microbatch, item.seconds) for item in items])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, {"ep": 8}, {"pp": 4, "ep": 8, "tp": 2}, {"pp": 8, "ep": 4, "zero": 3}]
)
@pytest.mark.parametrize("taken", [1.0, 0.8, 0.6])
def test_no_step_is_below_its_bound(layout, taken):
    made = run(**layout)
    fixed = {name: layout.get(name, 1) for name in ("tp", "ep", "pp", "vpp")}
    asked = Wanted(base=made, microbatches=(1,), fixed=fixed)
    bound = {item.run.layout: item.seconds for item in bounded(asked)}[made.layout]
    for planned in plan_homes(with_room(made, int(taken * most_bytes(made)))):
        stages = [stage.layers for stage in planned.costs.stages]
        own = least_seconds(stages, made.layout.pp, made.microbatches, overlaps=False)
        assert own >= bound * (1 - 1e-9)
        assert replay(planned.costs).seconds >= own * (1 - 1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_known_of_alike_layers_changes_no_cost(layout):
    made = run(**layout)
    known = Known(made)
    for rules in ([], [Rule("layers.*.moe.moe_act", "offload")], [Rule("layers.{2-9}", "recompute")]):
        again = replace(made, homes=PolicyHomes(Policy(rules)))
        assert step_costs(again, known) == step_costs(again)


def test_choices_are_of_regions_that_the_model_has():
    made = run(**PIPED)
    assert any("qkv" in name for choice in choices_of(made) for name, _ in choice)
    gqa = replace(made, config=preset("qwen3-30b-a3b", 16))
    assert not any("qkv" in name for choice in choices_of(gqa) for name, _ in choice)


def test_a_long_steady_state_goes_on_as_it_went():
    made = run(global_batch=1024, **PIPED)
    whole = replay(step_costs(made)).seconds
    assert made.microbatches == 128
    assert step_seconds(made)[1] == pytest.approx(whole, rel=0.01)


def wanted(devices: str, **more) -> Wanted:
    return Wanted(base=run(devices), **more)


def test_every_layout_divides():
    found = list(runs(wanted("h100:32")))
    assert len(found) > 20
    for made in found:
        layout = made.layout
        assert layout.devices % (layout.tp * layout.cp * layout.pp) == 0
        assert 256 % layout.ep == 0
        assert 128 % (layout.dp * made.microbatch) == 0
    assert {made.layout.pp for made in runs(wanted("h100:32", fixed={"pp": 4}))} == {4}


def test_the_best_fits_and_the_others_lack_something():
    found = search(wanted("h100:64", microbatches=(1,)))
    best = found.best
    room = best.run.cluster.device.memory
    assert max(rank.device_bytes for rank in best.costs.ranks) <= room
    assert 1 <= len(found.others) <= 5
    for other in found.others:
        assert other.played is None or other.seconds >= best.seconds
        assert found.lacks(other)


@pytest.mark.slow
def test_the_best_is_the_same_without_runners_up():
    alone, found = (search(wanted("h100:64", microbatches=(1,), runners_up=count)) for count in (0, 5))
    assert alone.others == ()
    assert alone.best.seconds == found.best.seconds
    assert alone.best.policies == found.best.policies


def test_a_plan_for_a_cluster_is_printed_and_written(tmp_path):
    folder = tmp_path / "plan"
    words = ["--preset", "deepseek-v3", "--layers", "5", "--cluster", "h100:16", "--seq", "4096"]
    more = ["--global-batch", "64", "--microbatch", "1", "--out", str(folder)]
    done = CliRunner().invoke(app, ["plan", *words, *more])
    assert done.exit_code == 0, done.output
    for text in (
        "runners-up",
        "lacks",
        "flags of pagestash",
        "% are left",
    ):
        assert text in done.output
    assert done.stderr.startswith("layout 1 of at most ")
    policies = sorted(folder.glob("policy-rank*.toml"))
    assert policies
    for path in policies:
        Policy.load(path)
    *broken, last = (folder / "flags.txt").read_text().splitlines()
    assert broken[0].startswith("--pp ")
    assert all(line.endswith(" \\") for line in broken)
    assert not last.endswith("\\")
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert (folder / "plan.json").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--cluster", "h100:8"], "no layout of 8 devices"),
        (["--cluster", "h100:8", "--budget", "1GiB"], "--cluster has its own memory"),
        ([], "--budget is missing"),
        (["--tp", "2", "--budget", "1GiB"], "--tp is for a model on a cluster: pass --cluster, too"),
        (["--cluster", "h100:8", "--batch", "4"], "--batch is for a measured step: no --cluster beside it"),
        (["--cluster", "h100:8", "--framework", "pith"], "--framework pith: expected one of pagestash"),
        (["--cluster", "h100:8", "--global-batch", "0"], "--global-batch 0: expected at least 1"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(words, told):
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
