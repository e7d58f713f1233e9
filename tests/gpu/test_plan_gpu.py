"""Plans on a GPU: a step under one keeps its budget, near what was predicted, with the same bits."""

import gc
import time

import pytest
import torch

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.planning.checked import measure_under
from pagestash.profiling.measure import repeated_step

pytestmark = pytest.mark.gpu


def measured(model, batch, policy):
    """Loss and gradients of a steady step under a policy, on the host, the device's peak and the fastest time."""
    keeper = ps.Keeper(policy).attach(model)
    times = []
    for _ in range(8):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        with keeper.step():
            loss = sum(model(*batch))
            loss.backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated()
    found = [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
    keeper.detach()
    model.zero_grad(set_to_none=True)
    return found, peak, min(times)


@pytest.mark.parametrize("part", [0.75, 0.5])
def test_a_planned_step_keeps_its_budget_and_its_bits(part, one_order):
    torch.manual_seed(0)
    model = Decoder(preset("tiny", layers=8), device="cuda", dtype=torch.bfloat16)
    model.initialise(0)
    tokens = torch.randint(0, 256, (64, 1025), device="cuda")
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    plan = ps.plan(model, batch, budget=part, repeats=1, waits=True)  # as `measured` does
    assert not plan.is_empty
    plain, _, _ = measured(model, batch, ps.Policy())
    planned, peak, seconds = measured(model, batch, plan.policy)
    assert all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))
    assert plan.predicted.peak_bytes == pytest.approx(peak, rel=0.05)
    # cuBLAS takes workspace for a stream that it sees for the first time.
    assert peak <= plan.budget_bytes + (64 << 20)
    # Other tests may run beside this one; a time of none, of a step alone or of another policy would be far off.
    assert 0.5 * seconds <= plan.measured_seconds <= 3 * seconds
    assert f"{1e3 * plan.measured_seconds:.2f} ms" in str(plan)


def test_fresh_gradients_of_one_measurement_are_gone_before_the_next():
    """Else they would count as there before, and a plan that exceeds its budget would pass."""
    model = Decoder(preset("tiny", layers=4), device="cuda", dtype=torch.bfloat16)
    model.initialise(0)
    tokens = torch.randint(0, 256, (4, 257), device="cuda")
    step = repeated_step(model, (tokens[:, :-1], tokens[:, 1:]), gradients="fresh")
    with step.gradients():
        first, second = (measure_under(step, ps.Policy(), timed=False).peak_bytes for _ in range(2))
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert abs(first - second) < size / 10


def graphed(model, batch, policy):
    """Losses of steps as a CUDA graph, two microbatches each, and the peak while it is captured."""
    gc.collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    keeper = ps.Keeper(policy).attach(model)

    def train_step():
        for _ in range(2):  # the second one finds the gradients of the first
            loss = sum(model(*batch))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
    losses = [step().clone() for _ in range(2)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    captured = step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    losses += [captured.clone(), step().clone()]
    step.wait()
    keeper.detach()
    return losses, peak


@pytest.mark.parametrize("part", [0.75, 0.5])
def test_a_graph_under_a_plan_for_it_keeps_the_budget_and_the_losses(part, one_order):
    def build():
        torch.manual_seed(0)
        model = Decoder(preset("tiny", layers=8), device="cuda", dtype=torch.bfloat16)
        model.initialise(0)
        return model

    # Torch keeps cuBLAS's workspace for the stream of a graph that is gone, and may give that stream to the next.
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    model = build()
    tokens = torch.randint(0, 256, (64, 1025), device="cuda")
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    plan = ps.plan(model, batch, budget=part, repeats=1, graphed=True)
    assert not plan.is_empty
    assert plan.measured_bytes is not None
    assert plan.measured_seconds is None  # eager steps say nothing about a graph's time
    del model
    # The plan first, for the same reason.
    (planned, peak), (plain, before) = (
        graphed(build(), batch, policy) for policy in (plan.policy, ps.Policy())
    )
    assert all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))
    assert peak <= plan.budget_bytes < before
    assert plan.predicted.peak_bytes == pytest.approx(peak, rel=0.03)
