"""`pagestash profile` as a user types it, and the examples of its guide."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import pagestash as ps
from pagestash.cli import app

ROOT = Path(__file__).parents[2]
GUIDE = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "profile.md").read_text(), flags=re.DOTALL)
SMALL = ["--preset", "tiny", "--layers", "2", "--batch", "1", "--seq", "16", "--repeats", "1"]


def run(*words):
    return CliRunner().invoke(app, ["profile", *map(str, words)])


def test_a_preset_as_table_json_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    result = run(
        *SMALL, "--json", tmp_path / "p.json", "--plot", tmp_path / "p.png", "--tensors", "layers.1.*"
    )
    assert result.exit_code == 0, result.output
    assert "saved for backward, by region" in result.stdout
    assert (tmp_path / "p.png").stat().st_size > 10_000
    found = ps.Profile.load(tmp_path / "p.json")
    assert found.total_bytes == json.loads((tmp_path / "p.json").read_text())["total_bytes"] > 0
    assert {"layers.0.mlp", "layers.1.moe.experts"} <= {region.name for region in found.regions}


def test_dtype_link_and_policy_are_heard(tmp_path):
    (tmp_path / "policy.toml").write_text(
        '[[rule]]\nmatch = "layers.*.attn.**"\nhome = "offload"\nmin_bytes = 1\n'
    )
    words = ["--dtype", "bfloat16", "--link", "1GB", "--policy", tmp_path / "policy.toml"]
    result = run(*SMALL, *words, "--json", tmp_path / "p.json")
    assert result.exit_code == 0, result.output
    found = ps.Profile.load(tmp_path / "p.json")
    assert found.link.out == found.link.back == 1e9
    assert found.home_bytes()["offload"] > 0
    assert "bfloat16" in {tensor.dtype for tensor in found.tensors if tensor.kind == "weight"}
    assert run(*SMALL, "--autocast", "bfloat16", "--json", tmp_path / "a.json").exit_code == 0
    assert ps.Profile.load(tmp_path / "a.json").bytes_of("weight_cast") > 0


def make_model():
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Tanh())


def make_model_and_batch():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)


def make_nothing():
    return "no model"


def make_without_batch():
    return nn.Linear(4, 4)


not_a_function = 7


def test_a_model_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    result = run("--module", "mine:make_model", "--batch", 2, "--seq", 8, "--json", tmp_path / "p.json")
    assert result.exit_code == 0, result.output
    shapes = [tensor.shape for tensor in ps.Profile.load(tmp_path / "p.json").tensors]
    assert (2, 8) in shapes
    assert (2, 8, 4) in shapes
    assert run("--module", "mine:make_model_and_batch").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "tyny"], "did you mean 'tiny'"),
        (["--preset", "tiny", "--layers", "0"], "layers=0"),
        (["--preset", "deepseek-v3", "--device", "cpu"], "--layers cuts it"),
        (["--module", "nowhere_at_all:make"], "No module named 'nowhere_at_all'"),
        (["--module", "mine:nothing_here"], "has no 'nothing_here'"),
        (["--module", "mine"], "expected pkg:name"),
        (["--module", "mine:not_a_function"], "is a int, no function"),
        (["--module", "mine:make_nothing"], "expected an nn.Module"),
        (["--module", "mine:make_without_batch"], "return (model, batch)"),
        (["--module", "mine:make_model", "--layers", "2"], "--layers is for presets"),
        (["--module", "mine:make_model", "--preset", "tiny"], "pass only one of them"),
        (["--batch", "0"], "--batch 0"),
        (["--seq", "0"], "--seq 0"),
        (["--dtype", "int8"], "--dtype int8: expected one of"),
        (["--device", "gpu0"], "--device gpu0: expected auto"),
        (["--link", "fast"], "--link='fast'"),
        (["--json", "nowhere/p.json"], "--json nowhere/p.json"),
        (["--policy", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(words, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    result = run(*words)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_picture_without_matplotlib_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(*SMALL, "--plot", tmp_path / "p.png")
    assert result.exit_code == 2
    assert "pip install 'pagestash[plot]'" in result.stderr


def test_the_commands_of_the_guide_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.toml").write_text(next(text for kind, text in GUIDE if kind == "toml"))
    (tmp_path / "mymodel.py").write_text(
        next(text for kind, text in GUIDE if kind == "python" and "def make_model" in text)
    )
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    commands = [line for kind, text in GUIDE if kind == "sh" for line in text.splitlines()]
    ours = [line for line in commands if line.startswith("pagestash profile") and "qwen3" not in line]
    assert len(ours) >= 3
    for line in ours:
        result = run(*shlex.split(line)[2:], "--repeats", "1", "--seq", "16")
        assert result.exit_code == 0, (line, result.output, result.exception)
