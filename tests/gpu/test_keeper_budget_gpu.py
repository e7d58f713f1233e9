"""A keeper with a budget on a GPU: the bits of training without, within the budget, eager and in a graph."""

from contextlib import nullcontext

import pytest
import torch

import pagestash as ps
from pagestash.models import Decoder, preset

pytestmark = pytest.mark.gpu


def made():
    torch.manual_seed(0)
    model = Decoder(preset("tiny", layers=8), device="cuda", dtype=torch.bfloat16)
    model.initialise(0)
    tokens = torch.randint(0, 256, (16, 1025), device="cuda")
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), batch


def test_eager_training_keeps_its_bits_and_its_budget(one_order):
    results = []
    for with_keeper in (False, True):
        before = torch.cuda.memory_allocated()
        model, optimizer, batch = made()
        keeper = ps.Keeper(budget=0.6, optimizer=optimizer).attach(model) if with_keeper else None
        losses = []
        for _ in range(6):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with nullcontext() if keeper is None else keeper.step():
                loss = sum(model(*batch))
                loss.backward()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            del loss
        results.append([*losses, *(p.detach().clone() for p in model.parameters())])
        if keeper is not None:  # the first run has made the workspaces of cuBLAS
            assert keeper.plan is not None
            assert keeper.policy.rules
            assert peak <= 1.02 * keeper.plan.budget_bytes
            keeper.detach()
        del model, optimizer, batch, keeper
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_graph_is_captured_under_the_plan(one_order):
    results = []
    for with_budget in (False, True):
        model, optimizer, batch = made()
        keeper = ps.Keeper(budget=0.6, optimizer=optimizer) if with_budget else ps.Keeper(ps.Policy())
        keeper.attach(model)

        def train_step(tokens, labels, model=model, optimizer=optimizer):
            loss = sum(model(tokens, labels))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
        losses = [step(*batch) for _ in range(6)]
        step.wait()
        results.append([*losses, *(p.detach().clone() for p in model.parameters())])
        assert (keeper.plan is not None) == with_budget
        assert bool(keeper.policy.rules) == with_budget
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_dropped_keeper_gives_its_memory_back_at_once():
    model, _, batch = made()
    sum(model(*batch)).backward()
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    rules = [ps.Rule("layers.*.moe.experts", "stash", min_bytes=0), ps.Rule("layers.*.attn", "offload")]
    for policy in (ps.Policy(rules), ps.Policy([ps.Rule("layers.*.attn", "recompute")])):
        keeper = ps.Keeper(policy).attach(model)
        for _ in range(3):
            with keeper.step():
                sum(model(*batch)).backward()
        model.zero_grad()
        keeper.detach()
        del keeper
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + (1 << 20)
