"""Training that does not fit the memory that a process may have: `Keeper(budget="auto")` makes it fit."""

import gc
from contextlib import nullcontext

import pytest
import torch

import pagestash as ps
from pagestash.models import Decoder, preset

pytestmark = pytest.mark.gpu
LAYERS, STEPS = 8, 5


def train(with_keeper: bool):
    """Losses and weights, on the host; the peak of the last steps; and what was planned."""
    torch.manual_seed(0)
    model = Decoder(preset("tiny", layers=LAYERS), device="cuda", dtype=torch.bfloat16)
    model.initialise(0)
    tokens = torch.randint(0, 256, (64, 1025), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    keeper = None
    if with_keeper:
        keeper = ps.Keeper(budget="auto", optimizer=optimizer, repeats=1).attach(model)
    losses = []
    for number in range(STEPS):
        if number == 2:  # the first under the plan is over
            torch.cuda.reset_peak_memory_stats()
        with nullcontext() if keeper is None else keeper.step():
            loss = sum(model(tokens[:, :-1], tokens[:, 1:]))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    peak = torch.cuda.max_memory_allocated()
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    if keeper is None:
        return losses, weights, peak, None
    keeper.detach()
    return losses, weights, peak, keeper.plan


def taken() -> int:
    """Bytes that this process holds of the GPU once all caches are empty."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.fixture
def limit():
    """Sets how many bytes of the GPU this process may have."""
    total = torch.cuda.get_device_properties(0).total_memory
    yield lambda most: torch.cuda.set_per_process_memory_fraction(most / total)
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_step_that_does_not_fit_is_trained_within_the_budget_with_the_same_bits(one_order, limit):
    losses, weights, peak, _ = train(with_keeper=False)
    before = taken()
    most = before + int(0.65 * (peak - before))
    limit(most)
    with pytest.raises(torch.OutOfMemoryError):
        train(with_keeper=False)
    taken()
    found, same_weights, peak, plan = train(with_keeper=True)
    assert plan.recomputed_layers == LAYERS
    assert plan.policy.rules
    assert found == losses
    assert all(torch.equal(one, other) for one, other in zip(weights, same_weights, strict=True))
    assert plan.budget_bytes < most
    assert peak <= 1.02 * plan.budget_bytes  # blocks of another loop may be a little larger
