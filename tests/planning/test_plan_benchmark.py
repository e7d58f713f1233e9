"""`benchmarks.plan`: every way computes the same loss, and a plan keeps its budget."""

import json

import pytest

import pagestash as ps
from benchmarks import plan as B


def test_all_ways_give_one_loss_and_plans_keep_their_budgets(tmp_path, monkeypatch):
    monkeypatch.setattr(B, "PARTS", (0.9, 0.01))
    body = json.loads(B.run(tmp_path, quick=True).read_text())
    rows = body["rows"]
    planned = [row for row in rows if row["way"] == "plan"]
    assert len({row["loss"] for row in rows if "loss" in row}) == 1
    assert planned[0]["peak_bytes"] <= planned[0]["budget_bytes"]
    assert planned[0]["predicted_peak_bytes"] == pytest.approx(planned[0]["peak_bytes"], rel=0.05)
    assert planned[1]["refused"].startswith("nothing fits ")
    assert {claim["what"].split(",")[0] for claim in body["claims"]} >= {
        "plan: predicted peak above weights and gradients",
        "plan: predicted step time",
        "plan: predicted step time from the profile alone",
    }


def test_a_run_that_was_cut_off_goes_on_behind_what_it_has_measured(tmp_path, monkeypatch):
    cases = [B.Case(preset=name, layers=2, batch=1, sequence=8) for name in ("first", "second")]
    monkeypatch.setattr(B, "QUICK", cases)
    monkeypatch.setenv("PAGESTASH_COMMIT", "one")
    ran = []

    def compare(case, device, *, rounds, repeats):
        ran.append(case.preset)
        if ran == ["first", "second"]:
            raise KeyboardInterrupt
        return [{"case": case.name, "way": "keep"}]

    monkeypatch.setattr(B, "compare", compare)
    with pytest.raises(KeyboardInterrupt):
        B.run(tmp_path, quick=True)
    path = B.run(tmp_path, quick=True, resume=True)
    assert ran == ["first", "second", "second"]
    assert [row["case"] for row in json.loads(path.read_text())["rows"]] == [case.name for case in cases]
    monkeypatch.setenv("PAGESTASH_COMMIT", "another")
    B.run(tmp_path, quick=True, resume=True)
    assert ran[3:] == ["first", "second"]


def test_a_second_round_is_for_plans_and_for_what_they_are_compared_with():
    rows = [{"way": way} for way in ("keep", "norms", "layers", "offload")] + [
        {"way": "plan", "budget_bytes": 10}
    ]
    measured = [(1.0, 20), (1.1, 12), (1.30, 8), (1.36, 9), (1.2, 9)]  # seconds, peak
    seen = [[{"seconds": seconds, "peak_bytes": peak}] for seconds, peak in measured]
    assert B.contenders(rows, seen) == [0, 2, 3, 4]
    seen[3][0]["seconds"] = 1.4
    assert B.contenders(rows, seen) == [0, 2, 4]


@pytest.mark.parametrize(
    ("times", "count"),
    [([2.0, 2.0, 2.0], 3), ([3.0, 2.5, 2.0, 2.2, 2.015], 5), ([3.0, 2.0, 2.5] + 9 * [2.1], 6)],
)
def test_rounds_go_on_until_the_two_fastest_agree(times, count, capsys):
    """A host that is slow for seconds at a time makes a policy slow, which is no property of it."""
    left = iter(times)
    plan = ps.Policy([ps.Rule("layers.*", "recompute")])
    base = {"case": "made up", "held_bytes": 0, "predicted_seconds": 2.0, "predicted_peak_bytes": 9}
    policies = [(base | {"way": "keep"}, ps.Policy()), (base | {"way": "plan", "budget_bytes": 9}, plan)]

    def measure(policy):
        return {"seconds": next(left) if policy.rules else 1.0, "peak_bytes": 9}

    keep, found = B.in_rounds(policies, measure, 3, 6)
    assert [each["seconds"] for each in found] == times[:count]
    assert len(keep) == 3
    assert capsys.readouterr().out.count("plan") == count


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
        | {"unfitted_seconds": 2.1},
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
