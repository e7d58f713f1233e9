"""`benchmarks.plan`: every way computes the same loss, and a plan keeps its budget."""

import json

import pytest
from typer.testing import CliRunner

import pagestash as ps
from benchmarks import plan as B
from benchmarks.__main__ import app


@pytest.mark.slow
def test_all_ways_give_one_loss_and_plans_keep_their_budgets(tmp_path, monkeypatch):
    path = B.run(tmp_path, quick=True, parts=(0.9, 0.01))
    assert path.name == "plan_part.json"  # it is not the whole benchmark
    body = json.loads(path.read_text())
    assert body["config"]["parts"] == [0.9, 0.01]
    rows = body["rows"]
    planned = [row for row in rows if row["way"] == "plan"]
    assert len({row["loss"] for row in rows if "loss" in row}) == 1
    assert planned[0]["peak_bytes"] <= planned[0]["budget_bytes"]
    assert planned[0]["predicted_peak_bytes"] == pytest.approx(planned[0]["peak_bytes"], rel=0.05)
    assert planned[1]["refused"].startswith("nothing fits ")
    assert {claim["what"].split(",")[0] for claim in body["claims"]} >= {
        "plan: predicted peak above weights and gradients",
        "plan: predicted step time",
    }


@pytest.fixture
def two_models(monkeypatch):
    """Two made-up models, the second of which is a graph, too; and those that were measured."""
    cases = [B.Case(preset="first", layers=2, batch=1, sequence=8)]
    cases.append(B.Case(preset="second", layers=2, batch=1, sequence=8, graphed=True))
    monkeypatch.setattr(B, "QUICK", cases)
    monkeypatch.setenv("PAGESTASH_COMMIT", "one")
    ran = []

    def compare(case, device, *, parts, rounds, repeats):
        ran.append(case.preset)
        base = {"case": case.name, "part": 0.5, "refused": "made up"}
        yield [base | {"way": "plan"}]
        if ran == ["first", "second"]:
            raise KeyboardInterrupt
        if case.graphed:
            yield [base | {"way": "plan, graphed"}]

    monkeypatch.setattr(B, "compare", compare)
    return cases, ran


def rows_of(path):
    return [(row["case"], row["way"]) for row in json.loads(path.read_text())["rows"]]


def test_a_run_that_was_cut_off_goes_on_behind_what_it_has_measured(tmp_path, two_models, monkeypatch):
    cases, ran = two_models
    first, second = (case.name for case in cases)
    with pytest.raises(KeyboardInterrupt):
        B.run(tmp_path, quick=True)
    # What the second model had measured is there, and measured again with the rest.
    assert rows_of(tmp_path / "plan.json") == [(first, "plan"), (second, "plan")]
    path = B.run(tmp_path, quick=True, resume=True)
    assert ran == ["first", "second", "second"]
    assert rows_of(path) == [(first, "plan"), (second, "plan"), (second, "plan, graphed")]
    monkeypatch.setenv("PAGESTASH_COMMIT", "another")
    path = B.run(tmp_path, quick=True, resume=True, models=1)
    assert rows_of(path) == [(first, "plan")]
    B.run(tmp_path, quick=True, resume=True, models=1)
    assert ran[3:] == ["first", "second"]


def test_one_preset_has_a_file_of_its_own(tmp_path, two_models):
    cases, _ = two_models
    alone = B.run(tmp_path, quick=True, only="second", parts=(0.5,))
    whole = B.run(tmp_path, quick=True, models=1)
    assert alone.name == "plan_part.json"
    assert rows_of(alone) == [(cases[1].name, "plan"), (cases[1].name, "plan, graphed")]
    assert rows_of(whole) == [(cases[0].name, "plan")]
    for wrong in (["--only", "third"], ["--part", "5"]):
        found = CliRunner().invoke(app, ["plan", "--quick", "--out", str(tmp_path), *wrong])
        assert found.exit_code == 2
        assert wrong[0] in found.output
    assert (
        "expected one of first, second"
        in CliRunner().invoke(app, ["plan", "--quick", "--only", "third"]).output
    )


def made_up_rows(*measured):
    """Rows and rounds: a way, predicted seconds, measured ones, and a peak."""
    base = {"case": "made up", "held_bytes": 0, "predicted_peak_bytes": 9, "budget_bytes": 10}
    rows = [base | {"way": way, "predicted_seconds": predicted} for way, predicted, _, _ in measured]
    return rows, [[{"seconds": seconds, "peak_bytes": peak}] for _, _, seconds, peak in measured]


def test_further_rounds_are_for_plans_and_for_what_they_are_compared_with():
    rows, seen = made_up_rows(
        ("keep", 1.0, 1.0, 20),
        ("norms", 1.1, 1.1, 12),
        ("layers", 1.3, 1.30, 8),
        ("offload", 1.36, 1.36, 9),
        ("plan", 1.2, 1.2, 9),
    )
    assert B.comparisons(rows, seen) == [{0}, {2, 3, 4}]
    rows[3]["predicted_seconds"] = seen[3][0]["seconds"] = 1.4
    assert B.comparisons(rows, seen) == [{0}, {2, 4}]
    rows[3]["predicted_seconds"] = 1.2  # in a slow moment it took 1.4
    assert B.comparisons(rows, seen) == [{0}, {3, 4}]


@pytest.mark.parametrize(
    ("times", "count"),
    [([2.0, 2.0, 2.0], 3), ([3.0, 2.5, 2.0, 2.2, 2.015], 5), ([3.0, 2.0, 2.5] + 9 * [2.1], 6)],
)
def test_rounds_of_a_plan_and_its_rival_go_on_until_the_two_fastest_agree(times, count, capsys):
    """A host that is slow for seconds at a time makes a policy slow, which is no property of it."""
    left = iter(times)
    rows, _ = made_up_rows(("keep", 1.0, 1.0, 20), ("layers", 2.1, 2.1, 9), ("plan", 2.0, 2.0, 9))
    policies = [(row, ps.Policy([ps.Rule(row["way"], "recompute")])) for row in rows]

    def measure(policy):
        way = policy.rules[0].match
        return {"seconds": next(left) if way == "plan" else 2.1, "peak_bytes": 20 if way == "keep" else 9}

    keep, layers, plan = B.in_rounds(policies, measure, 3, 6)
    assert [each["seconds"] for each in plan] == times[:count]
    assert len(keep) == 3
    assert len(layers) == count
    assert capsys.readouterr().out.count("made up, plan") == count


def test_graphs_and_steps_that_wait_are_compared_with_their_like_without_a_policy():
    base = {"case": "qwen3, 8 layers", "held_bytes": 0, "peak_bytes": 9, "predicted_peak_bytes": 9}
    rows = [
        base | {"way": "keep", "seconds": 2.0, "alone_seconds": 2.5, "predicted_seconds": 2.0},
        base
        | {"way": "plan, each step waits", "part": 0.5, "budget_bytes": 10, "alone_seconds": 3.0}
        | {"predicted_alone_seconds": 2.7},
        base | {"way": "keep, graphed", "seconds": 1.0, "predicted_seconds": 0.9},
        base
        | {"way": "plan", "part": 0.5, "budget_bytes": 10, "seconds": 2.2, "predicted_seconds": 2.1}
        | {"planning_seconds": 3.0},
        base
        | {"way": "plan, graphed", "part": 0.5, "budget_bytes": 10, "seconds": 1.1, "predicted_seconds": 0.9},
    ]
    rows.append({"case": "qwen3, 8 layers", "way": "plan, graphed", "part": 0.1, "refused": "nothing fits"})
    found = {claim.what: claim.value for claim in B.claims_of(rows)}
    assert found["plan for half of the bytes over keep, qwen3, 8 layers"] == pytest.approx(1.1)
    assert found[
        "plan for 0.5 of the bytes over the best by hand that fits, qwen3, 8 layers"
    ] == pytest.approx(1.1)
    assert found["plan, each step waits, for half of the bytes over keep, qwen3, 8 layers"] == pytest.approx(
        1.2
    )
    assert found["plan, each step waits: predicted step time, furthest off"] == pytest.approx(0.1)
    assert found["plan, each step waits: measured peak over the budget"] == pytest.approx(0.9)
    assert found["plan, graphed, for half of the bytes over keep, qwen3, 8 layers"] == pytest.approx(1.1)
    off = found["plan, graphed: predicted step time, furthest off, and of keep"]
    assert off == pytest.approx(1 - 0.9 / 1.1)
    assert found["plan, graphed: measured peak over the budget"] == pytest.approx(0.9)
