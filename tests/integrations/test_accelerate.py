"""accelerate under a policy: its accumulation and clipping around a keeper's steps."""

from contextlib import nullcontext

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from compatibility.one_rank import batches, policy_of, seeded  # noqa: E402
from support.compare import same  # noqa: E402
from support.pages import blocks  # noqa: E402

import pagestash as ps  # noqa: E402


@pytest.fixture(autouse=True)
def _begin_anew():
    """accelerate keeps its precision for the whole process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def train(home, mixed_precision="no"):
    runs = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision)
    model = seeded()
    model, optimizer = runs.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    keeper = None if home is None else ps.Keeper(policy_of(home)).attach(model)  # after prepare
    losses = []
    for x in batches(6):
        with runs.accumulate(model):
            with nullcontext() if keeper is None else keeper.step():
                loss = model(x).float().square().mean()
                runs.backward(loss)
            if runs.sync_gradients:
                runs.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    runs.free_memory()
    return (losses, [each.detach().clone() for each in model.parameters()]), keeper


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("home", ["stash", "offload", "recompute"])
def test_losses_and_weights_are_those_without_a_policy(home, mixed_precision):
    plain, _ = train(None, mixed_precision)
    kept, keeper = train(home, mixed_precision)
    assert same(kept, plain)
    assert keeper.stats().homes[home].peak > 0


def test_the_page():
    """The part of accelerate; that of DeepSpeed is `test_deepspeed.py`."""
    (_, text), _ = blocks("docs/frameworks.md")
    names = {"model": seeded(), "batches": batches()}
    exec(text, names)
    assert names["keeper"].stats().homes["recompute"].peak > 0
