"""`pagestash partition` as a user types it."""

import json

import pytest
from typer.testing import CliRunner

from pagestash.cli import app


def run(*words):
    return CliRunner().invoke(app, ["partition", *map(str, words)], env={"COLUMNS": "120"})


def test_the_table_has_every_stage_and_the_ranks_peaks():
    result = run("--preset", "deepseek-v2-lite", "--stages", 8, "--schedule", "dualpipev")
    assert result.exit_code == 0, result.output
    text = result.output
    assert "DualPipeV, 16 microbatches" in text
    assert "embed, layers.0" in text
    assert "head" in text
    assert "Largest peak" in text
    rows = [line for line in text.splitlines() if "×" in line]
    assert len(rows) == 8
    # A V: rank 0 has the first stage and the last.
    assert rows[0].split()[1:4:2] == ["0", "0"]
    assert rows[1].split("│")[2].strip() == "7"


def placed_of(path, *words):
    """What is written as JSON."""
    result = run(*words, "--json", path)
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())


def test_json_says_the_same(tmp_path):
    placed = placed_of(tmp_path / "p.json", "--preset", "tiny", "--stages", 2, "--microbatches", 4)
    assert placed["schedule"] == "1F1B"
    assert placed["optimal"] is True
    assert [name for stage in placed["stages"] for name in stage["layers"]] == [
        "embed", *(f"layers.{i}" for i in range(4)), "head"
    ]  # fmt: skip
    assert len(placed["peaks"]) == 2


def test_measured_costs_are_taken_from_a_file(tmp_path):
    rows = {f"layers.{i}": {"parameters": 10, "activations": 1, "forward": 0.5} for i in range(4)}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(rows))
    placed = placed_of(tmp_path / "p.json", "--costs", path, "--stages", 2, "--schedule", "GPipe")
    assert [len(stage["layers"]) for stage in placed["stages"]] == [2, 2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--stages", 9], "9 stages for 6 layers"),
        (["--stages", 3, "--schedule", "DualPipeV"], "expected a multiple of 2"),
        (["--stages", 4, "--schedule", "Nonsense"], "unknown schedule 'Nonsense'"),
        (["--stages", 4, "--microbatches", 2], "at least as many microbatches as stages"),
        (["--stages", 2, "--preset", "tinny"], "did you mean 'tiny'?"),
        (["--stages", 2, "--microbatch", 0], "--microbatch 0"),
        (["--stages", 2, "--ep", 2], "expert_parallel=2 does not divide"),
        (["--stages", 2, "--costs", "/nowhere.json"], "/nowhere.json: No such file"),
        (["--stages", -1], "-1 stages"),
        (["--stages", 2, "--layers", 10**9], "layers=1000000000: expected at most 10000"),
        (["--stages", 2, "--microbatches", 10**9], "microbatches=1000000000: expected at most 500000"),
        (["--stages", 2, "--microbatches", -1], "microbatches=-1"),
        (["--stages", 2, "--seq", 10**400], "expected at least 1, and less than 2^31"),
        (["--stages", 2, "--shards", 0], "--shards 0"),
        (["--stages", 2, "--memory", "-1"], "memory='-1'"),
    ],
)
def test_what_does_not_fit_is_one_line_and_code_2(words, told):
    result = run(*words)
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert told in lines[0]


def test_a_file_that_is_no_table_is_named(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text("nonsense")
    result = run("--costs", path, "--stages", 2)
    assert result.exit_code == 2
    assert str(path) in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        '{"regions": 1}',
        '{"regions": [1]}',
        '{"regions": [{}]}',
        '{"regions": [{"name": "embed"}]}',
        "[" * 5000,
        '{"a": {"parameters": 1e400, "activations": 1}, "b": {"parameters": 1, "activations": 1}}',
        '{"a": {"parameters": 1, "activations": 1, "forward": NaN}, "b": {"parameters": 1, "activations": 1}}',
        '{"a": {"parameters": %s, "activations": 1}, "b": {"parameters": 1, "activations": 1}}' % ("9" * 350),
    ],
    ids=range(8),
)
def test_a_table_with_wrong_values_is_one_line_with_its_name(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_text(text)
    result = run("--costs", path, "--stages", 2)
    assert result.exit_code == 2, result.exception
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {path}: ")


def test_a_profile_of_the_model_gives_activations_and_times(tmp_path):
    path = tmp_path / "profile.json"
    words = [
        "profile",
        "--preset",
        "tiny",
        "--batch",
        "1",
        "--seq",
        "32",
        "--device",
        "cpu",
        "--repeats",
        "1",
    ]
    assert CliRunner().invoke(app, [*words, "--json", str(path)]).exit_code == 0
    regions = {row["name"]: row for row in json.loads(path.read_text())["regions"]}
    placed = placed_of(tmp_path / "p.json", "--costs", path, "--stages", 2)
    everything = sum(stage["activations"] for stage in placed["stages"])
    assert everything == regions[""]["total_bytes"]
    assert sum(stage["time"] for stage in placed["stages"]) == pytest.approx(
        regions[""]["total_forward_seconds"] + regions[""]["total_backward_seconds"], rel=1e-6
    )
    result = run("--costs", path, "--layers", 3, "--stages", 2)
    assert result.exit_code == 2
    assert "the profile has 4 layers, the model 3" in result.stderr
