"""The commands of docs/pipeline.md; its Python runs in tests/guides."""

import json
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from pagestash.cli import app
from pagestash.pipeline import SCHEDULES, read_costs

TEXT = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_partition_command_runs():
    (line,) = [text for kind, text in BLOCKS if kind == "sh" and text.startswith("pagestash partition")]
    result = CliRunner().invoke(app, shlex.split(line)[1:], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "embed" in result.output


def test_the_launch_has_options_that_there_are():
    (line,) = [text for kind, text in BLOCKS if kind == "sh" and text.startswith("torchrun")]
    known = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    words = shlex.split(line)
    assert all(word in known for word in words[words.index("train") :] if word.startswith("--"))


def test_the_costs_are_costs():
    (text,) = [text for kind, text in BLOCKS if kind == "json"]
    assert [cost.name for cost in read_costs(json.loads(text))] == ["embed", "layers.0"]


def test_every_schedule_is_named():
    assert all(f"`{name}`" in TEXT for name in SCHEDULES)
