"""Steps that follow each other on a GPU: a host that is far ahead of it keeps predicted peaks, budgets and bits."""

import pytest
import torch

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.planning import predict
from pagestash.planning.budget import base_bytes
from pagestash.torch_internals import spin

pytestmark = pytest.mark.gpu


def decoder(layers=8, sequences=64):
    torch.manual_seed(0)
    model = Decoder(preset("tiny", layers=layers), device="cuda", dtype=torch.bfloat16)
    model.initialise(0)
    tokens = torch.randint(0, 256, (sequences, 1025), device="cuda")
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def run_ahead(model, batch, policy, count=4, spins=int(4e8)):
    """Loss and gradients of the last of some steps that follow each other, and their peak.

    The device is held back before each: the host has launched all of forward before it begins, and sees no copy
    end.
    """
    keeper = ps.Keeper(policy).attach(model)
    for number in range(3 + count):
        if number == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.zero_()
        spin(spins)
        with keeper.step():
            loss = sum(model(*batch))
            loss.backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    found = [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
    keeper.detach()
    model.zero_grad(set_to_none=True)
    return found, peak


@pytest.mark.parametrize("prefetch", [None, 8 << 20])
def test_a_host_far_ahead_of_the_device_has_the_predicted_peak_and_the_same_bits(one_order, prefetch):
    model, batch = decoder()
    profile = ps.profile(model, batch, repeats=1)
    policy = ps.Policy([ps.Rule("layers.*", "offload", min_bytes=1024, prefetch_bytes=prefetch)])
    plain, _ = run_ahead(model, batch, ps.Policy())
    found, peak = run_ahead(model, batch, policy)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    held = base_bytes(profile, 0)
    ahead = predict(profile, policy, base_bytes=held).peak_bytes - held
    assert ahead == pytest.approx(peak - held, rel=0.03)


@pytest.mark.parametrize("waits", [False, True])
def test_a_plan_keeps_its_budget_in_a_loop_in_which_the_host_is_far_ahead(one_order, waits):
    """One for steps that wait promises that only for these."""
    model, batch = decoder()
    plan = ps.plan(model, batch, budget=0.5, repeats=1, waits=waits)
    found, peak = run_ahead(model, batch, plan.policy)
    plain, _ = run_ahead(model, batch, ps.Policy())
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    if not waits:
        assert peak <= plan.budget_bytes + (64 << 20)
    assert plan.measured_seconds is not None


def test_a_profile_knows_what_a_step_takes_in_a_loop():
    """Other tests may run beside this one: it is about as long as one by itself, and never much longer."""
    model, batch = decoder(layers=4)
    found = ps.profile(model, batch, repeats=1)
    assert 0.3 * found.plain_seconds < found.loop_seconds < 1.5 * found.plain_seconds
    assert predict(found, ps.Policy()).seconds == pytest.approx(found.loop_seconds)
