"""`pagestash verify` as a user types it."""

import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from pagestash.cli import app


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), set()

    def forward(self, x):
        return self.linear(x).tanh()


class GrowsASet(Layer):
    def forward(self, x):
        self.seen.add(len(self.seen))
        return super().forward(x) * len(self.seen)


def make_model():
    return nn.Sequential(Layer(), Layer()), torch.randn(3, 4)


def make_odd_model():
    return nn.Sequential(Layer(), GrowsASet()), torch.randn(3, 4)


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    (tmp_path / "policy.toml").write_text('[[rule]]\nmatch = "*"\nhome = "recompute"\n')

    def run(*words):
        policy = ("--policy", str(tmp_path / "policy.toml"))
        return CliRunner().invoke(app, ["verify", *policy, "--device", "cpu", *words])

    return run


@pytest.mark.parametrize("optimizer", ["none", "sgd", "momentum", "adamw"])
def test_what_is_equal_ends_with_0(run, optimizer):
    done = run("--module", "mine:make_model", "--optimizer", optimizer, "--steps", "2")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("equal to the last bit: ")
    assert "results of 2 steps; moved at the peak: recompute " in done.stdout


def test_a_preset_is_verified(run, tmp_path):
    (tmp_path / "policy.toml").write_text('[[rule]]\nmatch = "layers.*.*_norm"\nhome = "recompute"\n')
    done = run("--layers", "1", "--seq", "16", "--autocast", "bfloat16", "--optimizer", "none")
    assert done.exit_code == 0, done.output


def test_what_differs_is_named_and_ends_with_1(run):
    done = run("--module", "mine:make_odd_model")
    assert done.exit_code == 1
    assert done.stdout.startswith(("different: step 2: the loss", "refused: "))
    assert "region: 1\n" in done.stdout or "'1'" in done.stdout


def test_what_is_refused_ends_with_1(run, tmp_path):
    (tmp_path / "policy.toml").write_text('[[rule]]\nmatch = "layers.*"\nhome = "recompute"\n')
    done = run("--module", "mine:make_model")
    assert done.exit_code == 1
    assert done.stdout.startswith("refused: ValueError: rule 'layers.*' matches no region")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--steps", "0"), "--steps 0: expected at least 1"),
        (("--optimizer", "adan"), "--optimizer adan: expected one of none, sgd, momentum, adamw"),
        (("--module", "mine:make_model", "--graphed", "--optimizer", "none"), "needs a model on a GPU"),
        (("--policy", "none.toml"), "none.toml"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_one_line(run, words, says):
    done = run("--layers", "1", "--seq", "16", *words) if "--module" not in words else run(*words)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
