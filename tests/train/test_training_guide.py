"""The commands of docs/training.md, with fewer steps."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagestash.cli import app
from pagestash.train import read_toml
from pagestash.train.config import merge

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), flags=re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


def test_the_commands_run_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    ours = [shlex.split(line)[1:] for line in COMMANDS if line.startswith("pagestash train")]
    assert len(ours) >= 4
    for steps, words in enumerate(ours, start=1):
        words[words.index("--steps") + 1] = str(steps)
        words[words.index("--out") + 1] = str(tmp_path / Path(words[words.index("--out") + 1]).name)
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.output, result.exception)


def test_the_launch_of_several_ranks_is_a_command_of_ours():
    (line,) = [line for line in COMMANDS if line.startswith("torchrun")]
    words = shlex.split(line)
    known = CliRunner().invoke(app, ["train", "--help"]).output
    assert words[words.index("-m") + 1 :][:2] == ["pagestash", "train"]
    assert all(word in known for word in words[words.index("train") :] if word.startswith("--"))


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "toml"])
def test_the_settings_are_settings(tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    merge(read_toml(tmp_path / "run.toml")).decoder()
