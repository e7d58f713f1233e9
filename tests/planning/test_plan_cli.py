"""`pagestash plan`, as a user types it."""

import importlib

import pytest
from test_plans import MB, made_up
from typer.testing import CliRunner

import pagestash as ps
from pagestash.cli import app

TINY = (
    "--preset",
    "tiny",
    "--layers",
    "2",
    "--batch",
    "4",
    "--seq",
    "128",
    "--repeats",
    "1",
    "--device",
    "cpu",
)


def run(*words):
    return CliRunner().invoke(app, ["plan", *words])


def test_a_plan_is_printed_and_its_policy_written(tmp_path):
    out = tmp_path / "policy.toml"
    done = run(*TINY, "--budget", "0.8", "--optimizer", "adamw", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "unplanned" in done.output
    assert "limit" in done.output
    assert ps.Policy.load(out).rules


def test_a_saved_profile_is_planned_without_running_anything(tmp_path, monkeypatch):
    profile = tmp_path / "profile.json"
    CliRunner().invoke(app, ["profile", *TINY, "--json", str(profile)])
    monkeypatch.setattr(importlib.import_module("pagestash.commands.step"), "profile", None)
    done = run("--profile", str(profile), "--budget", "8GiB")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("The step fits without a policy: ")
    small = run("--profile", str(profile), "--budget", "1200000")
    assert small.exit_code == 2
    assert small.stderr.startswith("error: nothing fits 1.1 MiB: the smallest plan takes ")


@pytest.mark.slow
def test_a_plan_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    curve, memory = tmp_path / "curve.svg", tmp_path / "memory.png"
    done = run(*TINY, "--budget", "0.8", "--curve", str(curve), "--plot", str(memory))
    assert done.exit_code == 0, done.output
    text = curve.read_text()
    for words in ("fastest plan for each budget", "keep all: ", "recompute layers: ", "this plan: ", "MiB"):
        assert words in text
    assert memory.read_bytes().startswith(b"\x89PNG")
    fits = run(*TINY, "--budget", "8GiB", "--curve", str(curve))
    assert fits.exit_code == 0, fits.output
    assert "fastest plan" not in curve.read_text()


@pytest.mark.parametrize("option", ["--curve", "--plot"])
def test_a_picture_without_matplotlib_is_refused_before_the_work(option, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(importlib.import_module("pagestash.commands.step"), "profile", None)
    done = run(*TINY, "--budget", "0.8", option, str(tmp_path / "p.png"))
    assert done.exit_code == 2
    assert done.stderr == f"error: {option} needs matplotlib: pip install 'pagestash[plot]'\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--budget", "-1"), "budget='-1'"),
        (("--budget", "lots"), "expected a part from 0 to 1"),
        (("--budget", "1.5"), "expected a part from 0 to 1"),
        (("--budget", "1GiB", "--host", "0.5"), "host='0.5': expected a number with a unit"),
        (("--budget", "1GiB", "--schedule", "GPipe"), "--schedule is for a pipeline: pass --pp, too"),
        (("--budget", "1GiB", "--overflow", "0.1"), "--overflow 0.1: pass --rows or --skew, too"),
        (("--budget", "1GiB", "--zero", "3"), "--zero is for a model on a cluster: pass --cluster, too"),
        (
            ("--cluster", "h100:8", "--skew", "1.5"),
            "--repeats is for a measured step: no --cluster beside it",
        ),
        (("--budget", "1GiB", "--optimizer", "adan"), "--optimizer adan: expected one of"),
        (("--budget", "1GiB", "--out", "/nowhere/policy.toml"), "expected a file in a folder that exists"),
        (("--budget", "1GiB", "--profile", "none.json"), "none.json: No such file"),
        (("--budget", "1GiB", "--profile", "none.json", "--preset", "tiny"), "pass no --preset"),
        (("--budget", "1GiB", "--host", "much"), "host='much'"),
        (
            ("--budget", "1GiB", "--curve", "nowhere/c.png"),
            "--curve nowhere/c.png: expected a file in a folder",
        ),
        (
            ("--budget", "1GiB", "--plot", "c.doc"),
            "--plot c.doc: expected a picture's suffix, like .png or .svg",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*words, *(() if "--profile" in words else ("--layers", "2", "--seq", "16", "--repeats", "1")))
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def profile_file(tmp_path):
    path = tmp_path / "profile.json"
    made_up(3, (8 * MB, 20), (5 * MB, 20)).save(path)
    return path


def test_a_saved_profile_is_planned_for_another_link(profile_file):
    """At 10 MB/s copies would take seconds, so nothing leaves. Nor does it on a CPU, which has no link."""
    quick, slow, none = (
        run("--profile", str(profile_file), "--budget", "0.8", *link)
        for link in (("--link", "1GB"), ("--link", "10MB"), ())
    )
    assert quick.exit_code == slow.exit_code == none.exit_code == 0
    assert "link       0 B each way" not in quick.output
    assert "link       0 B each way" in slow.stdout
    assert "link       0 B each way" in none.stdout
    assert "a CPU has no link to other memory" in none.stderr
    assert not quick.stderr + slow.stderr


def test_a_plan_fits_80_columns(profile_file):
    words = ["plan", "--profile", str(profile_file), "--budget", "0.7"]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert done.stderr.startswith("note: ")
    assert max(map(len, [*lines, *done.stderr.splitlines()])) <= 80
    below = lines[[line.split(" ")[0] for line in lines].index("planned") + 1]
    assert below.startswith("           ")  # what is too long for a line goes on below its beginning


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--link", "0"), "--link 0: expected bytes per second"),
        (("--link", "fast"), "--link='fast': expected"),
        (("--gradients", "fresh"), "--profile has the measured step: pass no --gradients beside it"),
        (("--layers", "3"), "pass no --layers beside it"),
        (("--batch", "99"), "pass no --batch beside it"),
        (("--device", "cuda"), "pass no --device beside it"),
        (("--repeats", "1"), "pass no --repeats beside it"),
    ],
)
def test_options_that_a_saved_profile_does_not_take_are_refused(profile_file, words, says):
    done = run("--profile", str(profile_file), "--budget", "0.5", *words)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_function_that_takes_arguments_is_no_model(tmp_path, monkeypatch):
    (tmp_path / "with_arguments.py").write_text("def make(width):\n    raise AssertionError\n")
    monkeypatch.chdir(tmp_path)
    done = run("--module", "with_arguments:make", "--budget", "0.5")
    assert done.exit_code == 2
    assert "missing a required argument: 'width'; expected a function without" in done.stderr
