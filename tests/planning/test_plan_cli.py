"""`pagestash plan`, as a user types it."""

import importlib

import pytest
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
    small = run("--profile", str(profile), "--budget", "1000000")
    assert small.exit_code == 2
    assert small.stderr.startswith("error: nothing fits 976.6 KiB: the smallest plan takes ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--budget", "-1"), "budget='-1'"),
        (("--budget", "lots"), "expected a number with a unit"),
        (("--budget", "1GiB", "--optimizer", "adan"), "--optimizer adan: expected one of"),
        (("--budget", "1GiB", "--out", "/nowhere/policy.toml"), "expected a file in a folder that exists"),
        (("--budget", "1GiB", "--profile", "none.json"), "none.json: No such file"),
        (("--budget", "1GiB", "--profile", "none.json", "--preset", "tiny"), "pass no --preset"),
        (("--budget", "1GiB", "--host", "much"), "host='much'"),
    ],
)
def test_what_makes_no_sense_is_one_line(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*words, *(() if "--profile" in words else ("--layers", "2", "--seq", "16", "--repeats", "1")))
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
