"""Result files, and the table made from them."""

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import __main__ as command_line
from benchmarks import hooks, offload, offload_deep, step_memory, tables
from benchmarks.harness import Claim, write

FAST = Claim(what="stash over `a | b`", value=0.951234, bar=0.92, better="at least")
SMALL = Claim(what="held bytes", value=0.5, bar=0.45, better="at most", unit="GiB")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A README, a page and a folder of results of its own."""
    folder = tmp_path / "results"
    write("speed", config={"size": 3}, rows=[{"seconds": 0.5}], claims=[FAST, SMALL], out=folder)
    for name in ("README", "PAGE"):
        text = tmp_path / f"{name}.md"
        text.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
        monkeypatch.setattr(tables, name, text)
    monkeypatch.setattr(tables, "RESULTS", folder)
    return folder


@pytest.mark.parametrize(
    ("value", "better", "holds"),
    [(1.0, "at least", True), (0.9, "at least", False), (1.0, "at most", True), (1.1, "at most", False)],
)
def test_a_claim_holds_at_its_bar_and_on_the_better_side(value, better, holds):
    assert Claim(what="", value=value, bar=1.0, better=better).holds is holds


def test_a_result_keeps_what_was_measured_and_where(results, monkeypatch):
    monkeypatch.setenv("PAGESTASH_COMMIT", "abc123")
    path = write("again", config={"size": 3}, rows=[{"seconds": 0.5}], claims=[FAST, SMALL], out=results)
    assert path == results / "again.json"
    body = json.loads(path.read_text())
    assert (body["benchmark"], body["config"], body["rows"]) == ("again", {"size": 3}, [{"seconds": 0.5}])
    assert body["environment"]["commit"] == "abc123"
    assert body["environment"]["machine"]
    assert "torch" in body["environment"]["versions"]
    kept = [
        Claim(**{key: value for key, value in claim.items() if key != "holds"}) for claim in body["claims"]
    ]
    assert kept == [FAST, SMALL]
    assert [claim["holds"] for claim in body["claims"]] == [True, False]


def test_the_page_has_a_line_for_each_claim_and_hides_no_miss(results):
    name, _, machine, _, head, rule, fast, small = tables.render(results).splitlines()
    assert name == "## speed"
    assert "torch" in machine
    assert head == "| what | seen | bar |"
    assert fast == "| stash over `a \\| b` | 0.9512 | ≥ 0.92 |"
    assert small == "| held bytes | 0.5 GiB (missed) | ≤ 0.45 GiB |"
    assert rule.count("|") == head.count("|") == 4


def test_the_readme_has_a_line_for_each_rival(results):
    assert tables.rivals(results) == tables.NONE_YET
    rows = [
        {"way": "plain", "ms": 158.4, "gib": 15.071, "longest": 34816},
        {"way": "ours", "ms": 80.5, "gib": 5.75, "commit": "0123456789ab"},
    ]
    path = write("rivals", config={}, rows=rows, claims=[], out=results)
    body = json.loads(path.read_text())
    body["environment"]["versions"]["transformers"] = "5.17.0"
    path.write_text(json.dumps(body))
    head, rule, *lines, _, where = tables.rivals(results).splitlines()
    assert lines == ["| plain | 158 | 15.07 |", "| ours* | 80 | 5.75 |"]
    assert rule.count("|") == head.count("|") == 4
    assert "transformers 5.17.0" in where
    assert "(\\*: 0123456)" in where
    assert list(tables.lengths(rows))[2:] == ["| plain | 34,816 |"]


def test_the_ways_of_hugging_face_have_a_line_each(results):
    rows = [
        {"way": "plain", "ms": 158.94, "gib": 15.071, "fresh_ms": 152.4, "products": "quack 0.3.1"},
        {"way": "graphed", "ms": 104.46},
    ]
    head, rule, plain, graphed = tables.hugging_face(rows)
    assert (plain, graphed) == ("| plain | 158.9 | 152.4 | 15.07 | quack |", "| graphed | 104.5 |  |  | – |")
    assert rule.count("|") == head.count("|") == plain.count("|")
    path = write("hf_step", config={}, rows=rows, claims=[FAST], out=results)
    body = json.loads(path.read_text())
    body["environment"]["versions"]["transformers"] = "5.17.0"
    path.write_text(json.dumps(body))
    page = tables.render(results)
    assert plain in page  # below the claims
    assert ", transformers 5.17.0, " in page


def test_plans_stand_beside_policies_by_hand():
    gib = 1 << 30
    shared = {"case": "a model", "held_bytes": 10 * gib}
    plan = {"way": "plan", "part": 0.5, "budget_bytes": 13 * gib, "predicted_seconds": 0.11}
    plan |= {"alone_seconds": 0.13, "predicted_alone_seconds": 0.125}
    rows = [
        {**shared, "way": "keep", "seconds": 0.1, "peak_bytes": 16 * gib},
        {**shared, **plan, "seconds": 0.12, "peak_bytes": 12 * gib, "predicted_peak_bytes": 12.5 * gib},
        {**shared, "way": "plan", "part": 0.1, "refused": "nothing fits 1 GiB"},
    ]
    head, rule, case, *lines = tables.plans(rows)
    assert case.startswith("| **a model** |")
    assert lines == [
        "| keep | 100.0 |  |  | 6.00 |  |  |",
        "| plan for 0.5 | 120.0 | 110.0 | 130.0 (predicted 125.0) | 2.00 | 2.50 | 3.00 |",
        "| plan for 0.1 | nothing fits |  |  |  |  |  |",
    ]
    assert {line.count("|") for line in (head, rule, case, *lines)} == {8}


def test_the_table_of_ranks_has_a_line_for_each_way():
    rows = [
        {"preset": "qwen3", "way": "exact, eager", "ms": 85.46, "held_gib": 23.89},
        {
            "preset": "qwen3",
            "way": "stashed, graph",
            "ms": 50.57,
            "products": "torch (no GPU)",
            "held_gib": 11.12,
            "expected": 1.396,
        },
    ]
    _, _, preset, *lines = tables.expert_parallel_ranks(rows)
    assert preset == "| **qwen3** | | | | |"
    assert lines == [
        "| exact, eager | 85.5 | 23.9 |  | – |",
        "| stashed, graph | 50.6 | 11.1 | 1.40 | torch |",
    ]


def test_only_what_stands_between_the_markers_is_replaced(results):
    table = tables.render(results)
    assert tables.update(tables.PAGE, table, check=True)
    assert "old" in tables.PAGE.read_text()
    assert tables.update(tables.PAGE, table)
    assert tables.PAGE.read_text() == f"before\n{tables.BEGIN}\n{table}\n{tables.END}\nafter\n"
    assert not tables.update(tables.PAGE, table)


def test_a_text_without_markers_is_refused():
    with pytest.raises(ValueError, match="results"):
        tables.replaced("no markers", "table")


@pytest.mark.usefixtures("results")
def test_the_table_command_fails_while_the_table_is_stale():
    runner = CliRunner()
    stale = runner.invoke(command_line.app, ["table", "--check"])
    assert stale.exit_code == 1
    assert "stale" in stale.output
    assert runner.invoke(command_line.app, ["table"]).exit_code == 0
    assert "old" not in tables.README.read_text() + tables.PAGE.read_text()
    assert runner.invoke(command_line.app, ["table", "--check"]).exit_code == 0


def test_all_runs_what_is_there_says_what_is_not_and_fails_on_a_miss(results, monkeypatch):
    class Fake:
        @staticmethod
        def run(out, quick):
            return write("fake", config={"quick": quick}, rows=[], claims=[FAST, SMALL], out=out)

    known = {"pool": Fake, "graphed_stack": "there is no such benchmark yet"}
    monkeypatch.setattr(command_line, "BENCHMARKS", tuple(known))
    monkeypatch.setattr(command_line, "load", known.__getitem__)
    done = CliRunner().invoke(command_line.app, ["all", "--quick", "--out", str(results)])
    assert done.exit_code == 1
    assert "graphed_stack: skipped, there is no such benchmark yet" in done.output
    assert "MISSED 0.5 (at most 0.45) held bytes" in done.output
    assert json.loads((results / "fake.json").read_text())["config"] == {"quick": True}


def test_a_benchmark_that_cannot_run_is_a_reason_and_no_error(monkeypatch):
    assert command_line.load("no_such_benchmark") == "there is no such benchmark yet"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command_line.load("pool").__name__ == "benchmarks.pool"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command_line.load("pool") == "it needs a CUDA GPU"
    done = CliRunner().invoke(command_line.app, ["pool", "--quick"])
    assert done.exit_code == 2
    assert "pool: cannot run, it needs a CUDA GPU" in done.output


def test_the_readme_and_the_page_show_the_results_that_are_kept():
    for page, table in ((tables.PAGE, tables.render()), (tables.README, tables.rivals())):
        assert not tables.update(page, table, check=True), "stale: run `python -m benchmarks table`"


def test_the_picture_of_a_step_is_drawn_from_the_result_that_is_kept():
    body = json.loads((tables.RESULTS / "step_memory.json").read_text())
    assert step_memory.PICTURE.read_text() == step_memory.draw(body["rows"], body["config"])
    peaks = [f"{row['peak_bytes'] / 2**20:.0f} MiB" for row in body["rows"]]
    assert all(peak in (tables.ROOT / "docs" / "index.md").read_text() for peak in peaks)


@pytest.mark.slow
def test_the_cost_of_each_hook_is_measured_on_any_machine(tmp_path):
    body = json.loads(hooks.run(tmp_path, quick=True).read_text())
    rows = {row["way"]: row for row in body["rows"] if "way" in row}
    assert set(rows) == {way.name for way in hooks.WAYS}
    steps = {row["step"]: row["us"] for row in body["rows"] if "step" in row}
    eager = {f"{hooks.EAGER}, {name}" for name in hooks.EAGER_POLICIES}
    assert set(steps) == {"no keeper", *hooks.POLICIES} | eager
    assert all({"pack", "unpack", "enter", "leave"} <= set(row) for row in rows.values())
    assert all("replay" in row for name, row in rows.items() if name.startswith("recomputed"))
    # A GPU's step is compared as a whole, too.
    assert {claim["unit"] for claim in body["claims"]} <= {"µs", ""}
    assert len(body["claims"]) >= 5


def test_a_deep_slice_offloads_on_any_machine(tmp_path):
    body = json.loads(offload_deep.run(tmp_path, quick=True).read_text())
    keep, moved, again = body["rows"]
    assert keep["moved_bytes"] == again["moved_bytes"] == 0 < moved["moved_bytes"]
    assert keep["loss"] == moved["loss"]
    assert "step time over keep" in body["claims"][0]["what"]


def test_a_fraction_that_moves_nothing_is_0_and_has_its_reasons(capsys):
    bench = offload.Bench(offload.Slice("tiny", 2, 2, 64), torch.device("cpu"))
    chosen = offload.rules("offload", ("layers.*.moe.expert_fc1",), min_bytes=1024)
    _, fraction = offload.fitting(bench.profile(repeats=1), chosen)
    assert fraction == 0.0
    assert "region 'layers.1.moe.router' saves the same tensors" in capsys.readouterr().out
    assert offload.fall_over_moved({"peak_bytes": 1}, {"peak_bytes": 1, "moved_bytes": 0}) == 0.0
