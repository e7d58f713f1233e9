"""Any home for any region of a decoder in a CUDA graph, to the bits of no policy; and what regions hold there."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from support import same

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.policy import HOMES

# Read once, at the first product on a GPU, which may be another file's.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from ten_names import MORE, NAMES, TINY, covering, table

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_order")]
SEQUENCES, LENGTH = 2, 128


def make():
    model = Decoder(
        preset("tiny", layers=2, dense_layers=0, shared_experts=1), device="cuda", dtype=torch.bfloat16
    )
    model.initialise(0)
    return model


def tokens(seed):
    return torch.randint(
        0, 256, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    ).cuda()


def train(homes, steps=5):
    """Losses and weights after five steps, of which the third is captured."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rules = [ps.Rule(f"layers.*.{name}", home, min_bytes=0) for name, home in zip(NAMES, homes)]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page="4KiB"))).attach(model)

    def train_step(batch):
        loss = sum(model(batch[:, :-1], batch[:, 1:]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
    losses = [step(tokens(number)) for number in range(steps)]
    step.wait()
    assert step.reruns == 0
    return [torch.stack(losses), *(parameter.detach().clone() for parameter in model.parameters())]


def test_all_pairs_of_homes_over_all_pairs_of_regions_give_the_same_bits_in_a_graph():
    plain = train([])
    assert same(train([]), plain)
    wrong = [homes for homes in covering(HOMES) if not same(train(homes), plain)]
    assert not wrong


def test_the_documented_formulas_hold_on_a_gpu():
    """In bf16, and with norms that are one kernel."""
    model, batch = make(), tokens(0)
    rules = [ps.Rule(f"layers.*.{name}", "keep") for name in NAMES + MORE]
    keeper = ps.Keeper(ps.Policy(rules)).attach(model)
    with keeper.step():
        sum(model(batch[:, :-1], batch[:, 1:])).backward()
    regions = keeper.stats().regions
    for region, _, new, _ in table(TINY | {"b": 2, "c": 0}):
        if "parallel" in region:
            continue
        names = [f"layers.1.{name}" for name in re.findall("`([^`]+)`", region)]
        size = sum(regions[name].peak for name in names if name in regions)
        # Beside what grows with the tokens there are a few numbers for each expert, and attention's random state.
        assert 0 <= size - new * SEQUENCES * LENGTH <= 8 * 8 + 32, region
