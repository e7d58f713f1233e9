"""`pagestash demo`: the same losses with about half of the activations."""

import re
from dataclasses import replace

import pytest
from support.search import search_little
from typer.testing import CliRunner

import pagestash as ps
import pagestash.commands.demo as demo
from pagestash.cli import app
from pagestash.sizes import format_bytes


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The same story in seconds."""
    search_little(monkeypatch)
    monkeypatch.setattr(demo, "SHAPE", replace(demo.SHAPE, layers=8, experts=4))
    monkeypatch.setattr(demo, "TOKENS", 128)


@pytest.fixture
def smaller(monkeypatch, small):
    """Where no figure counts."""
    monkeypatch.setattr(demo, "SHAPE", replace(demo.SHAPE, layers=4))
    monkeypatch.setattr(demo, "TOKENS", 64)


def run(*words):
    result = CliRunner().invoke(app, ["demo", "--steps", "2", *map(str, words)], env={"COLUMNS": "80"})
    assert all(len(line) <= 80 for line in result.output.splitlines() if "/" not in line)
    return result, " ".join(result.output.split())


def test_half_of_the_activations_the_same_losses_and_pictures(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    out, drawn = tmp_path / "new" / "folder", []
    for draw in (ps.Plan.plot_curve, ps.Plan.plot_memory):
        monkeypatch.setattr(
            ps.Plan, draw.__name__, lambda plan, path, draw=draw: (drawn.append(plan), draw(plan, path))
        )
    result, text = run("--out", out)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "Losses of all 2 steps are equal to the last bit: yes." in text
    assert "Two more steps, verified: equal to the last bit: " in text
    predicted, measured, *_ = (float(cell) for cell in re.findall(r"(\d\.\d\d) │", text))
    assert 0.2 < predicted <= 0.475
    assert measured == pytest.approx(predicted, rel=0.05)
    assert measured <= 0.5
    assert ps.Policy.load(out / "policy.toml").rules
    assert ps.Profile.load(out / "profile.json").total_bytes > 0
    for name in ("curve.png", "memory.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    for plan in drawn:  # of the bytes that the table counts
        assert format_bytes(plan.unplanned.peak_bytes) in text
        assert format_bytes(plan.predicted.peak_bytes) in text
        assert max(map(sum, zip(*plan.predicted.memory.values()))) == plan.predicted.peak_bytes
    assert len(drawn) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("smaller")
def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result, text = run("--out", tmp_path)
    assert result.exit_code == 0, result.output
    before, _, _ = text.partition("1. Profile a step")  # at the start, not after a minute
    assert "Without pictures: they need matplotlib (pip install 'pagestash[plot]')." in before
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.slow
@pytest.mark.usefixtures("smaller")
def test_it_fails_when_a_loss_differs_in_a_bit(tmp_path, monkeypatch):
    train = demo.Run.train

    def skewed(self, batch):
        train(self, batch)
        if self.keeper is not None:
            self.losses[0] += 2**-20

    monkeypatch.setattr(demo.Run, "train", skewed)
    result, text = run("--out", tmp_path)
    assert result.exit_code == 1
    assert "equal to the last bit: NO" in text


def test_a_folder_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    result, _ = run("--out", tmp_path / "file")
    assert result.exit_code == 2
    assert result.stderr == f"error: --out {tmp_path / 'file'}: File exists\n"
