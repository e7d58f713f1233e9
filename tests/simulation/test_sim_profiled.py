"""One rank is what `pagestash plan` predicts."""

from functools import cache

import pytest
import torch

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.planning.make import plan_profile
from pagestash.planning.predict import predict
from pagestash.policy import Policy, Rule
from pagestash.profiling import Link
from pagestash.schedules.plan import plans
from pagestash.simulation.played import Replay
from pagestash.simulation.profiled import link_of_profile, program_of_profile
from pagestash.simulation.replay import Machine, run_step


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch):
    monkeypatch.setattr("pagestash.kernels.backend.interpreted", lambda: False)


@cache
def profile(rate: float):
    tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(0))
    model = Decoder(preset("tiny", layers=6))
    model.initialise(0)
    return ps.profile(model, (tokens[:, :-1], tokens[:, 1:]), repeats=1, link=Link(out=rate, back=rate))


def replayed(found, policy: Policy) -> Replay:
    one = plans("1F1B", ranks=1, microbatches=1)
    machine = Machine(link=link_of_profile(found.link))
    return run_step(one, [program_of_profile(found, policy)], machine)


@pytest.mark.parametrize("rate", [1e7, 1e8, 1e9, 1e12])
@pytest.mark.parametrize("match", ["layers.**", "layers.*.attn.core_attn", "layers.{0-3}.**"])
def test_one_rank_takes_the_predicted_time_under_offload(rate, match):
    found = profile(rate)
    policy = Policy([Rule(match, "offload", min_bytes=1024)])
    assert replayed(found, policy).seconds == pytest.approx(predict(found, policy).seconds, rel=1e-9)


@pytest.mark.parametrize("rate", [1e7, 1e8, 1e9, 1e12])
def test_one_rank_peaks_as_predicted_where_all_layers_are_offloaded(rate):
    found = profile(rate)
    policy = Policy([Rule("layers.**", "offload", min_bytes=1024)])
    predicted, kept = predict(found, policy), predict(found, Policy())
    assert replayed(found, policy).peak_bytes == predicted.peak_bytes < kept.peak_bytes
    assert replayed(found, Policy()).peak_bytes == kept.peak_bytes


@pytest.mark.parametrize("part", [0.9, 0.8, 0.7])
def test_one_rank_takes_the_planned_time(part):
    found = profile(1e9)
    planned = plan_profile(found, budget=part, host="1GiB")
    assert planned.policy.rules
    played = replayed(found, planned.policy)
    assert played.seconds == pytest.approx(planned.predicted.seconds, rel=1e-9)


def test_waits_are_in_it():
    found = profile(1e7)
    policy = Policy([Rule("layers.**", "offload", min_bytes=1024)])
    assert predict(found, policy).wait_seconds > 0
    assert replayed(found, policy).seconds > 1.1 * replayed(found, Policy()).seconds
