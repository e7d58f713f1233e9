"""GraphedStep on a CPU: an overflowing step changes nothing, and the batch runs again to the same bits."""

import copy
import gc
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import same
from support.processes import start_ranks
from torch import nn

import pagestash as ps

sys.path.insert(0, str(Path(__file__).parents[1] / "saved"))
from stack import Stack, batch, policy
from support.steps import training_step

ROWS = [8, 8, 50, 12, 64, 64]  # the third and the fifth need more pages than any before


def make(optimizer="adamw", pool=None, seed=0):
    torch.manual_seed(seed)
    model = Stack()
    makers = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    }
    chosen = makers[optimizer](model.parameters())
    keeper = ps.Keeper(policy(headroom=1.0, **(pool or {})), backend="torch").attach(model)
    return model, chosen, keeper, ps.GraphedStep(training_step(model, chosen), keeper, optimizer=chosen)


def everything(model, optimizer):
    """Every number a step may change: parameters, buffers, optimizer state, random state."""
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [
        t.detach().clone() for t in [*model.parameters(), *model.buffers(), *state, torch.get_rng_state()]
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_short_pool_ends_with_the_bits_of_a_large_one(optimizer):
    ends, losses = [], []
    for pool in ({}, {"device": "1MiB"}):
        model, chosen, keeper, step = make(optimizer, pool)
        torch.manual_seed(5)
        losses.append([step(*batch(rows, seed)) for seed, rows in enumerate(ROWS)])
        ends.append(everything(model, chosen))
        assert step.reruns == (0 if pool else 2)
        stats = keeper.stats()
        assert not stats.overflow
        assert stats.pool.device.in_use == 0
    assert same(*ends)
    assert same(*losses)


def test_the_pool_grows_to_what_was_wanted_and_no_further():
    *_, keeper, step = make()
    for rows in ROWS:
        step(*batch(rows))
    exact = keeper.pool.device_pages
    *_, step = make(pool={"device": exact * 256})
    for rows in ROWS:
        step(*batch(rows))
    assert step.reruns == 0
    *_, step = make(pool={"device": (exact - 1) * 256})
    for rows in ROWS:
        step(*batch(rows))
    assert step.reruns == 1


def test_an_overflowing_attempt_leaves_everything_untouched(monkeypatch):
    model, optimizer, _, step = make()
    step(*batch(8))
    before = everything(model, optimizer)
    after = []
    monkeypatch.setattr(step, "_grow", lambda: after.append(everything(model, optimizer)) or stop())

    def stop():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        step(*batch(64))
    assert len(after) == 1
    assert same(before, after[0])
    assert all(p.grad is None for p in model.parameters())


def test_state_that_the_step_changes_besides_is_put_back():
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    keeper = ps.Keeper(policy(headroom=1.0), backend="torch").attach(model)
    tokens = torch.zeros((), dtype=torch.int64)
    calls = []

    def train_step(x, rows):
        calls.append(int(rows))
        tokens.add_(rows)
        model(x, rows).backward()
        optimizer.step()
        optimizer.zero_grad()

    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer, state=[tokens])
    for rows in (8, 60, 8):
        step(*batch(rows))
    assert calls == [8, 60, 60, 8]
    assert tokens == 8 + 60 + 8
    assert model.seen == 3


def test_gradients_of_a_step_without_an_optimizer_add_up_right():
    plain, model = Stack(), Stack()
    model.load_state_dict(plain.state_dict())
    keeper = ps.Keeper(policy(headroom=1.0), backend="torch").attach(model)

    def backward_only(x, rows):
        model(x, rows).backward()

    step = ps.GraphedStep(backward_only, keeper)
    for call in (lambda *b: plain(*b).backward(), step):
        torch.manual_seed(3)
        for rows in (8, 60, 20):
            call(*batch(rows))
    assert step.reruns == 1
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


def test_a_step_that_changes_parameters_on_its_own_is_refused():
    model = Stack()
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x, rows):
        model(x, rows).backward()
        optimizer.step()

    with pytest.raises(ValueError, match="pass optimizer="):
        ps.GraphedStep(train_step, keeper)(*batch(8))


def test_a_step_that_never_fits_says_so(monkeypatch):
    *_, keeper, step = make(pool={"device": 256})
    monkeypatch.setattr(keeper, "grow_pool", lambda: (0, 0))
    with pytest.raises(RuntimeError, match="overflowed 4 times on one batch"):
        step(*batch(64))


def test_host_pages_take_what_does_not_fit():
    model, optimizer, keeper, step = make(pool={"device": 256 * 30, "host": "1MiB"})
    torch.manual_seed(5)
    for seed, rows in enumerate(ROWS):
        step(*batch(rows, seed))
    assert step.reruns == 0
    assert keeper.stats().spilled_bytes > 0
    large = make(pool={"device": "1MiB"})
    torch.manual_seed(5)
    for seed, rows in enumerate(ROWS):
        large[3](*batch(rows, seed))
    assert same(everything(model, optimizer), everything(*large[:2]))


def test_an_optimizer_does_not_keep_a_step_that_is_gone():
    _, optimizer, keeper, step = make()
    step(*batch(8))
    pool = weakref.ref(keeper.pool)
    keeper.detach()
    del keeper, step
    gc.collect()
    assert pool() is None
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"warmup": 0}, "warmup=0"), ({"graph": True}, "graph=True: a CUDA graph needs a model on a GPU")],
)
def test_bad_arguments_are_named(arguments, message):
    keeper = ps.Keeper(policy()).attach(Stack())
    with pytest.raises(ValueError, match=message):
        ps.GraphedStep(print, keeper, **arguments)


def test_a_keeper_without_a_model_is_refused():
    with pytest.raises(ValueError, match=r"keeper\.attach\(model\)"):
        ps.GraphedStep(print, ps.Keeper(ps.Policy()))


def _rank(rank: int, world: int, path: str, rows: list[list[int]]) -> None:
    os.environ["TRITON_INTERPRET"] = "0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=world)
    model, optimizer, keeper, step = make(seed=7)
    small = model.state_dict()
    large_model, large_optimizer, _, large = make(seed=7, pool={"device": "1MiB"})
    large_model.load_state_dict(copy.deepcopy(small))
    for one in (step, large):
        torch.manual_seed(11)
        for seed, count in enumerate(rows[rank]):
            one(*batch(count, seed))
    equal = same(everything(model, optimizer), everything(large_model, large_optimizer))
    torch.save((step.reruns, large.reruns, equal, keeper.pool.device_pages), f"{path}/{rank}.pt")
    dist.destroy_process_group()


def test_all_ranks_skip_and_rerun_together(tmp_path):
    # Only rank 1 is ever short; both run the batch again, and only rank 1's pool grows.
    rows = [[20, 20, 20, 20], [20, 20, 60, 20]]
    start_ranks(_rank, (2, str(tmp_path), rows), 2)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert [r[0] for r in results] == [1, 1]
    assert [r[1] for r in results] == [0, 0]
    assert all(r[2] for r in results)
    assert results[0][3] < results[1][3]


def test_buffers_of_the_model_are_protected(caplog):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Stack(1)
            self.norm = nn.BatchNorm1d(32)

        def forward(self, x, rows):
            return self.inner(self.norm(x), rows)

    torch.manual_seed(0)
    model = Counting()
    rules = [ps.Rule("inner.layers.*.experts", "stash", min_bytes=256)]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=256, headroom=1.0)), backend="torch").attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train_step(x, rows):
        model(x, rows).backward()
        optimizer.step()
        optimizer.zero_grad()

    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
    step(*batch(8))
    step(*batch(60))
    assert "the pool overflowed and has grown" in caplog.text
    assert model.norm.num_batches_tracked == 2
    assert model.inner.seen == 2


class Bounded(nn.Module):
    """Counts on the device how many rows it was given; more than its capacity are too many."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.register_buffer("over_capacity", torch.zeros(()), persistent=False)
        self.register_buffer("most", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x, rows):
        torch.maximum(self.most, rows, out=self.most)
        torch.maximum(self.over_capacity, (rows > self.capacity).float(), out=self.over_capacity)
        return torch.where(
            torch.arange(len(x))[:, None] < min(int(rows), self.capacity), x, 0.0
        )  # drops the rest

    def grow_capacity(self) -> bool:
        grown = int(self.most) > self.capacity
        self.capacity = max(self.capacity, int(self.most))
        return grown

    def clear_over_capacity(self) -> None:
        self.over_capacity.zero_()


def test_a_buffer_over_its_capacity_reruns_the_batch_like_a_pool():
    class Model(nn.Module):
        def __init__(self, capacity: int) -> None:
            super().__init__()
            self.bound = Bounded(capacity)
            self.inner = Stack(1)

        def forward(self, x, rows):
            return self.inner(self.bound(x, rows), rows)

    ends = []
    for capacity in (64, 10):
        torch.manual_seed(0)
        model = Model(capacity)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        keeper = ps.Keeper(ps.Policy()).attach(model)
        step = ps.GraphedStep(training_step(model, optimizer), keeper, optimizer=optimizer)
        torch.manual_seed(5)
        losses = [step(*batch(rows, rows)) for rows in (8, 40, 20, 64)]
        ends.append([*losses, *everything(model, optimizer)])
        assert step.reruns == (0 if capacity == 64 else 2)
        assert model.bound.capacity == 64
        assert model.inner.seen == 4
    # The last two buffers aside (the flag and the count), every number is the same.
    assert same(*ends)


@pytest.mark.parametrize("second", ["another optimizer", "the same again"])
def test_saving_tensors_after_an_update_is_refused(second):
    """An overflow there could no longer leave the first update out."""
    torch.manual_seed(0)
    model = Stack()
    halves = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.layers[:2]]
    keeper = ps.Keeper(policy(), backend="torch").attach(model)

    def train_step(x, rows):
        model(x, rows).backward()
        halves[0].step()
        model(x, rows).backward()
        halves[1 if second == "another optimizer" else 0].step()

    step = ps.GraphedStep(train_step, keeper, optimizer=halves)
    with pytest.raises(ValueError, match="after an optimizer's step"):
        step(*batch(8))


def test_several_optimizers_after_all_backwards_are_fine():
    torch.manual_seed(0)
    model = Stack()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model.layers]
    keeper = ps.Keeper(policy(headroom=1.0), backend="torch").attach(model)

    def train_step(x, rows):
        model(x, rows).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step = ps.GraphedStep(train_step, keeper, optimizer=optimizers)
    for rows in (8, 60, 8):
        step(*batch(rows))
    assert step.reruns == 1
    assert model.seen == 3
