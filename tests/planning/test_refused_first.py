"""What is wrong with a plan's arguments is said before anything is measured."""

import json
import re

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import pagestash as ps
from pagestash.cli import app
from pagestash.commands import step as commands_step
from pagestash.planning import plan_profile

PART = r"expected a part from 0 to 1 like 0\.5 or '50%' \(1\.0 is all\), bytes like '40GiB', or 'auto'"
WRONG = [
    ({"budget": [1]}, rf"budget=\[1\]: {PART}"),
    ({"budget": -1}, "budget=-1: expected 0 or more"),
    ({"budget": 1}, rf"budget=1 is in bytes, and a step takes more; {PART}"),
    ({"budget": 40}, rf"budget=40 is in bytes, and a step takes more; {PART}"),
    ({"budget": 1.5}, rf"budget=1\.5: {PART}"),
    ({"budget": 0.5, "host": -1}, "host=-1: expected 0 or more"),
    ({"budget": 0.5, "host": "-3"}, "host='-3': expected 0 or more"),
    ({"budget": 0.5, "host": "abc"}, "host='abc': expected a number with a unit"),
    ({"budget": 0.5, "optimizer": "adamw"}, "optimizer='adamw': expected the optimizer that trains"),
    ({"budget": 0.5, "optimizer": torch.optim.AdamW}, "expected the optimizer that trains"),
    ({"budget": 0.5, "loss": "ce"}, "loss='ce': expected a function of the model's output"),
]


class Untouched(nn.Linear):
    def forward(self, x):
        raise AssertionError("nothing is to run")


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments_are_refused_before_a_forward(arguments, message):
    with pytest.raises(ValueError, match=message):
        ps.plan(Untouched(4, 4), torch.randn(2, 4), **arguments)
    with pytest.raises(ValueError, match=message):
        ps.Keeper(**arguments)


def test_a_device_without_memory_of_its_own_has_no_auto():
    with pytest.raises(ValueError, match="budget='auto': cpu has no memory of its own"):
        ps.plan(Untouched(4, 4), torch.randn(2, 4), budget="auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "-1"], "budget='-1': expected 0 or more"),
        (["--budget", "1.5"], "budget='1.5': expected a part"),
        (["--budget", "0.5", "--host", "-3"], "host='-3': expected 0 or more"),
        (["--budget", "auto", "--device", "cpu"], "budget='auto': cpu has no memory of its own"),
        (["--budget", "1.5", "--pp", "2"], "budget='1.5': expected a part"),
    ],
)
def test_the_command_line_refuses_them_before_it_loads_a_model(options, message, monkeypatch):
    def load(*_):
        raise AssertionError("nothing is to be loaded")

    monkeypatch.setattr(commands_step, "_from_preset", load)
    found = CliRunner().invoke(app, ["plan", "--preset", "tiny", *options])
    assert found.exit_code == 2
    assert message in re.sub(r"\s+", " ", found.output)


def test_a_profile_whose_segments_take_no_time_is_refused(tmp_path):
    ps.profile(nn.Linear(4, 4), torch.randn(2, 4), repeats=1).save(tmp_path / "profile.json")
    data = json.loads((tmp_path / "profile.json").read_text())
    for segment in data["segments"]:
        segment["seconds"] = 0.0
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="the profile's segments take no time"):
        plan_profile(ps.Profile.load(tmp_path / "profile.json"), budget=0.5)
