"""Random steps in pools that are too small: eager steps that keep or raise, and GraphedStep, against no keeper.

python tests/step/test_overflow_fuzz.py 1000 3000      # other seeds
"""

import copy
import logging
import random
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support.tiers import slow
from torch import nn

import pagestash as ps

sys.path.insert(0, str(Path(__file__).parents[1] / "saved"))
from stack import CAPACITY, WIDTH, Block


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.lin(x)) ** 2


class Nested(nn.Module):
    """A region that may be recomputed, in one whose tensors may be elsewhere; and buffers that change."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.inner = Inner()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, rows):
        self.seen += len(x)
        self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        return x + self.inner(torch.sin(self.a(self.norm(x - self.ema))))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x, rows):
        return x + self.dropout(nn.functional.gelu(self.lin(x)))


class Net(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.layers = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x, rows):
        for layer in self.layers:
            x = layer(x, rows)
        valid = torch.arange(x.shape[0]) < rows
        return torch.where(valid[:, None], x, 0.0).square().mean()


def rules(draw, kinds):
    """A home for each layer, and for what is inside it."""
    found = []
    for number, kind in enumerate(kinds):
        if kind is Block:
            found.append(
                ps.Rule(f"layers.{number}.experts", draw.choice(["stash", "stash", "offload"]), min_bytes=256)
            )
        if kind is Nested and draw.random() < 0.7:
            home = draw.choice(["recompute", "recompute", "stash", "keep"])
            found.append(ps.Rule(f"layers.{number}.inner", home, min_bytes=0))
        homes = ["stash", "stash", "stash", "offload", "keep"] + (["recompute"] if kind is Plain else [])
        home = draw.choice(homes)
        fraction = {"fraction": draw.choice([1.0, 0.5, 0.0])} if home == "offload" else {}
        found.append(ps.Rule(f"layers.{number}", home, min_bytes=0, **fraction))
    return found


class Case:
    def __init__(self, seed):
        draw = random.Random(seed)
        kinds = [draw.choice([Block, Nested, Plain]) for _ in range(draw.randint(1, 4))]
        torch.manual_seed(seed)
        self.model = Net(kinds)
        self.rules = rules(draw, kinds)
        self.pool = {
            "page": draw.choice([256, 512, 1024]),
            "headroom": draw.choice([1.0, 1.1]),
            "device": draw.choice(["auto", "auto", 1024, 1024 * draw.randint(1, 60), "4MiB"]),
        }
        if draw.random() < 0.3:
            self.pool |= {"spill": 1024 * draw.randint(1, 40), "host": "8MiB"}
        self.adam = draw.random() < 0.5
        self.steps = [
            [
                (draw.choice([2, 4, 8, 30, CAPACITY]), draw.randint(2, CAPACITY), draw.random())
                for _ in range(draw.randint(1, 3))
            ]
            for _ in range(draw.randint(2, 5))
        ]
        self.together = draw.random() < 0.5
        """All forwards of a step before its backwards."""

    def fresh(self):
        model = copy.deepcopy(self.model)
        parameters = model.parameters()
        optimizer = (
            torch.optim.AdamW(parameters, lr=1e-2, fused=True)
            if self.adam
            else torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
        )
        torch.manual_seed(7)
        return model, optimizer

    def keeper(self, model, **pool):
        return ps.Keeper(ps.Policy(self.rules, ps.PoolConfig(**self.pool, **pool)), backend="torch").attach(
            model
        )

    def passes(self, model, step):
        """Forwards and backwards of one step."""
        losses = []
        for size, rows, seed in step:
            x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(int(seed * 1e6)))
            losses.append(model(x, torch.tensor(min(rows, size))))
            if not self.together:
                losses[-1].backward()
        if self.together:
            torch.stack(losses).sum().backward()
        return torch.stack(losses).detach()

    def end(self, model, optimizer, losses):
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [*losses, *model.parameters(), *model.buffers(), *state, torch.get_rng_state()]

    def without(self):
        model, optimizer = self.fresh()
        losses = []
        for step in self.steps:
            losses.append(self.passes(model, step))
            optimizer.step()
            optimizer.zero_grad()
        return self.end(model, optimizer, losses)

    def eager(self, on_overflow):
        model, optimizer = self.fresh()
        keeper = self.keeper(model, on_overflow=on_overflow)
        losses, hits = [], 0
        for step in self.steps:
            while True:
                before = copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()
                try:
                    with keeper.step():
                        result = self.passes(model, step)
                except ps.PoolOverflow:
                    assert on_overflow == "raise"
                    hits += 1
                    assert hits < 50
                    model.load_state_dict(before[0], strict=False)
                    torch.set_rng_state(before[1])
                    optimizer.zero_grad()
                    continue
                break
            losses.append(result)
            optimizer.step()
            optimizer.zero_grad()
        stats = keeper.stats()
        assert not stats.overflow
        assert stats.no_page.bytes == 0
        assert stats.pool is None or stats.pool.device.in_use == stats.pool.host.in_use == 0
        return self.end(model, optimizer, losses), hits + stats.no_page.groups

    def graphed(self):
        model, optimizer = self.fresh()
        keeper = self.keeper(model)

        def train_step(step):
            losses = self.passes(model, step)
            optimizer.step()
            optimizer.zero_grad()
            return losses

        run = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
        losses = [run(step) for step in self.steps]
        return self.end(model, optimizer, losses), run.reruns


def play(seed):
    """How often each way was short of pages; all of them end with the same bits."""
    case = Case(seed)
    plain = case.without()
    found = {}
    for name, way in (
        ("keep", lambda: case.eager("keep")),
        ("raise", lambda: case.eager("raise")),
        ("graphed", case.graphed),
    ):
        result, found[name] = way()
        same = [torch.equal(a, b) for a, b in zip(plain, result, strict=True)]
        assert all(same), f"seed {seed}, {name}: {same}"
    return found


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [(4, 10, 19), *slow(((15, 24, 30, 35, 42),))])
def test_every_way_ends_with_the_bits_of_no_keeper(seeds):
    found = [play(seed) for seed in seeds]
    # And every way was short of pages, in each of them.
    assert all(all(each.values()) for each in found)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    total = {"keep": 0, "raise": 0, "graphed": 0}
    first, last = map(int, sys.argv[1:])
    for seed in range(first, last):
        try:
            for name, count in play(seed).items():
                total[name] += count
        except Exception as error:  # all of them are wanted
            print(seed, type(error).__name__, str(error)[:300], flush=True)
    print(last - first, "cases; short of pages:", total)
