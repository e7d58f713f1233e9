"""A plan that is saved is the same in another run, and a keeper takes it."""

import json

import pytest
import torch
from test_plans import MB, made_up
from torch import nn

import pagestash as ps
from pagestash.planning import plan_profile


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        with ps.region("inner"):
            return x + self.down(torch.tanh(self.up(x)))


def planned(**options):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Layer() for _ in range(4))), torch.randn(32, 64)
    return model, x, ps.plan(model, x, budget=0.6, loss=torch.sum, repeats=1, **options)


def test_a_plan_comes_back_as_it_was_saved(tmp_path):
    *_, plan = planned()
    plan.save(tmp_path / "plan.json")
    again = ps.Plan.load(tmp_path / "plan.json")
    assert plan.policy.rules
    assert plan.regions
    assert again == plan
    assert str(again) == str(plan)


@pytest.mark.parametrize(
    "options", [{"budget": 1.0}, {"budget": 0.5, "rows": None}, {"budget": 0.3, "host": 0}]
)
def test_plans_of_a_profile_come_back_too(options, tmp_path):
    plan = plan_profile(made_up(4, (40 * MB, 4.0), (20 * MB, 10.0), workspace=7 * MB), **options)
    plan.save(tmp_path / "plan.json")
    again = ps.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert str(again) == str(plan)


def test_a_keeper_takes_a_plan_with_the_regions_that_it_found(tmp_path):
    model, x, plan = planned(host=0)
    plan.save(tmp_path / "plan.json")
    model(x).sum().backward()
    expected = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    keeper = ps.Keeper(ps.Plan.load(tmp_path / "plan.json")).attach(model)
    assert (keeper.policy, keeper.plan) == (plan.policy, plan)
    with keeper.step():
        model(x).sum().backward()
    assert all(torch.equal(each.grad, own) for each, own in zip(model.parameters(), expected))
    assert keeper.stats().homes["recompute"].peak > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "this is no plan that this version can read"),
        ({"turn": "x"}, "plan.turn: expected a whole number, found 'x'"),
        ({"policy": "rule = 1"}, "rule=1: expected tables"),
        ({"policy": "["}, "Invalid"),
        ({"predicted": []}, "plan.predicted: expected its fields by name"),
        ({"rows": 1}, "plan.rows: expected a list, found 1"),
        ({"curve": [[1]]}, "plan.curve: expected a list of 2"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_in_one_line(change, says, tmp_path):
    file = tmp_path / "plan.json"
    plan_profile(made_up(2, (8 * MB, 2), (5 * MB, 6)), budget=0.7).save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=r"plan\.json: ") as error:
        ps.Plan.load(file)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_planning_tells_how_far_it_is():
    told = []
    planned(progress=lambda *said: told.append(said))
    whats = list(dict.fromkeys(what for what, _, _ in told))
    assert whats[0] == "warming up"
    assert whats[-2:] == ["predicting policies", "running steps under plans"]
    assert all(type(number) is int and number >= 0 for _, number, _ in told)


def test_a_bar_is_for_terminals_and_draws_from_no_generator(capfd):
    import random

    state = random.getstate()
    planned(progress=True)
    assert capfd.readouterr() == ("", "")
    assert random.getstate() == state
