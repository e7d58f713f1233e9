"""What a profile records: every saved tensor, its region, whose memory it is, and who else holds it."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.profiling.recorder import TensorRecorder
from pagestash.saved.fused import claim

ROWS, WIDTH = 6, 8
SIZE = ROWS * WIDTH * 4


def saved_storages(loss):
    """Storages that the graph of `loss` holds, read off its nodes: no hook, no profile."""
    found, waiting, seen = {}, [loss.grad_fn], {loss.grad_fn}

    def note(value):
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = (storage.nbytes(), value)
        elif isinstance(value, tuple | list):
            for item in value:
                note(item)

    while waiting:
        node = waiting.pop()
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                note(getattr(node, name))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def count(model, args, loss):
    """Bytes of those storages, without weights, buffers and the batch."""
    value = loss(model(*args))
    ours = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *args)}
    return sum(size for place, (size, _) in saved_storages(value).items() if place not in ours)


def test_the_sum_is_that_of_a_walk_over_the_graph():
    model = Decoder(preset("tiny"))
    model.initialise(0)
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    found = ps.profile(model, batch, repeats=1)
    assert found.total_bytes == count(model, batch, lambda output: output[0] + output[1])
    assert sum(region.bytes for region in found.regions) == found.total_bytes
    assert found.region("").total_bytes == found.total_bytes


def test_the_sum_is_that_of_a_walk_over_the_graph_with_views_and_lists():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            q, k, v = self.a(x).chunk(3, dim=-1)
            joined = torch.cat([q * k, torch.sigmoid(v)[:, :3]], dim=-1)
            return torch.var(self.b(q.expand(4, ROWS, WIDTH)), dim=-1).sum() + joined.tanh().sum()

    model, x = Model(), torch.randn(ROWS, WIDTH)
    found = ps.profile(model, x, repeats=1)
    assert found.total_bytes == count(model, (x,), lambda output: output)


class Kinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x):
        x = x * self.scale  # saves the input and the weight
        x = x * self.table  # saves the buffer
        x = x @ self.matrix.t()  # saves an activation and a view of a weight
        return (x.double() @ self.matrix.double()).sum()  # saves a cast of each


def test_kinds_are_told_apart_by_storage():
    found = ps.profile(Kinds(), torch.randn(ROWS, WIDTH, requires_grad=True), repeats=1)
    kinds = {(tensor.kind, tensor.shape, tensor.dtype): tensor.counted for tensor in found.tensors}
    assert kinds == {
        ("input", (ROWS, WIDTH), "float32"): 0,
        ("weight", (WIDTH,), "float32"): 0,
        ("buffer", (WIDTH,), "float32"): 0,
        ("activation", (ROWS, WIDTH), "float32"): SIZE,
        ("weight_view", (WIDTH, WIDTH), "float32"): 0,
        ("activation", (ROWS, WIDTH), "float64"): 2 * SIZE,
        ("weight_cast", (WIDTH, WIDTH), "float64"): WIDTH * WIDTH * 8,
    }
    assert found.total_bytes == 3 * SIZE + WIDTH * WIDTH * 8
    assert found.bytes_of("weight_cast") == WIDTH * WIDTH * 8


@pytest.mark.parametrize("where", ["argument", "caller"])
def test_casts_of_autocast_are_casts_of_weights(where):
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(ROWS, WIDTH, requires_grad=True)
    if where == "argument":
        found = ps.profile(model, x, repeats=1, autocast=torch.bfloat16, loss=lambda y: y.float().sum())
    else:
        # The casts of a pass stay in the caller's cache, where the next would find them already made.
        with torch.autocast("cpu", torch.bfloat16):
            found = ps.profile(model, x, repeats=1, loss=lambda y: y.float().sum())
    (cast,) = (tensor for tensor in found.tensors if tensor.kind == "weight_cast")
    assert (cast.dtype, cast.counted, cast.held_by) == ("bfloat16", 2 * WIDTH * WIDTH, ())


class Shared(nn.Module):
    """`a` makes y, which `b` and `c` save too; it may be kept by somebody else."""

    def __init__(self, keep=""):
        super().__init__()
        self.a, self.b, self.c = nn.Sigmoid(), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.keep, self.kept = keep, None

    def forward(self, x):
        y = self.a(self.first(x))
        if self.keep == "output":
            self.kept = y
        elif self.keep == "made here":
            y = y * 2
            self.kept = y[:1]
        total = self.b(y).sum() + self.c(y).sum()
        return (total, y) if self.keep == "result" else total


@pytest.mark.parametrize(
    ("keep", "holder"),
    [
        ("", None),
        ("output", "output of a"),
        ("made here", "user code"),
        ("result", "the model's output"),
    ],
)
def test_a_storage_is_counted_once_and_its_holders_are_named(keep, holder):
    found = ps.profile(Shared(keep), torch.randn(ROWS, WIDTH), repeats=1)
    b, c = (
        next(t for t in found.tensors if t.region == name and t.kind == "activation") for name in ("b", "c")
    )
    assert b.storage == c.storage
    held = {name for name in b.held_by if name not in ("a", "b", "c")}
    assert held == ({holder} if holder else set())
    assert b.elsewhere is (holder is not None)
    assert "c" in b.held_by
    assert "b" in c.held_by
    assert "b" not in b.held_by
    same = [tensor for tensor in found.tensors if tensor.storage == b.storage]
    assert [tensor.counted for tensor in same] == [SIZE, *[0] * (len(same) - 1)]
    # What somebody else holds, no home can free.
    owner = found.region(same[0].region)
    assert (owner.homes["offload"].saved_bytes == 0) is (holder is not None)


def test_the_batch_is_held_by_the_batch():
    found = ps.profile(nn.Linear(WIDTH, 2), torch.randn(ROWS, WIDTH), repeats=1)
    (tensor,) = found.tensors
    assert (tensor.kind, tensor.held_by, tensor.counted) == ("input", ("the batch",), 0)
    assert found.total_bytes == 0


class Fused(torch.autograd.Function):
    """Stands for two modules, and saves the input of each."""

    @staticmethod
    def forward(ctx, x, first, second, rows):
        h = x.sin()
        first(x)  # that it ran changes nothing: what it claims was saved by the fused operation
        claim(first, x)
        claim(second, h, rows=rows, capacity=ROWS)
        ctx.save_for_backward(x, h)
        return h.cos()

    @staticmethod
    def backward(ctx, dy):
        x, h = ctx.saved_tensors
        return -dy * h.sin() * x.cos(), None, None, None


class WithFused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.up = nn.Identity(), nn.Identity(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, rows):
        with ps.region("rest"):
            x = self.up(x).exp() + 1
            with ps.region():
                return Fused.apply(x, self.first, self.second, rows)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = WithFused()

    def forward(self, x, rows):
        return self.block(x, rows).sum()


def test_regions_are_modules_named_stretches_and_what_a_fused_operation_claims():
    found = ps.profile(Outer(), (torch.randn(ROWS, WIDTH), torch.tensor(2)), repeats=1)
    saved = {t.region: t for t in found.tensors if t.kind == "activation"}
    assert list(saved) == ["block.rest", "block.first", "block.second"]
    assert saved["block.first"].path == ("", "block", "block.rest", "block.first")
    first, rest = found.region("block.first"), found.region("block.rest")
    assert (first.calls, first.within) == (1, "block.rest")
    assert (found.region("block.second").calls, found.region("block.second").within) == (0, "block.rest")
    assert (rest.calls, rest.within) == (1, "block.rest")
    assert first.homes["recompute"].seconds == rest.total_forward_seconds
    assert first.hidden_bytes == rest.hidden_bytes
    # In the order of the step, though one of them never ran.
    order = [region.name for region in found.regions]
    assert order.index("block.rest") < order.index("block.first") < order.index("block.second")
    # A named stretch has no inputs that could be run again.
    assert "recompute" not in rest.homes
    assert "recompute" in found.region("block.up").homes


def test_rows_past_the_valid_ones_are_what_a_stash_saves():
    found = ps.profile(Outer(), (torch.randn(ROWS, WIDTH), torch.tensor(2)), repeats=1)
    whole, part = (
        next(t for t in found.tensors if t.region == name and t.counted)
        for name in ("block.rest", "block.second")
    )
    assert (whole.counted, whole.valid_bytes) == (SIZE, SIZE)
    assert (part.counted, part.valid_bytes) == (SIZE, 2 * WIDTH * 4)
    second = found.region("block.second").homes
    assert second["stash"].saved_bytes == SIZE - 2 * WIDTH * 4
    assert second["stash"].seconds == pytest.approx(2 * 2 * WIDTH * 4 / found.link.copy)
    assert found.region("block.rest").homes["stash"].saved_bytes == 0


def test_what_nobody_will_ask_for_is_not_saved():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.watcher = nn.Linear(WIDTH, WIDTH), nn.Sigmoid()

        def forward(self, x):
            y = self.layer(x).tanh()
            self.watcher(y.exp())  # for looking at; its graph is dropped at once
            return y.sum()

    x = torch.randn(ROWS, WIDTH)
    found = ps.profile(Model(), x, repeats=1)
    assert found.total_bytes == SIZE == count(Model(), (x,), lambda output: output)
    (tensor,) = (tensor for tensor in found.tensors if tensor.counted)
    assert tensor.held_by == ()


def test_nothing_outlives_the_profile():
    made = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.act = nn.Linear(WIDTH, WIDTH), nn.Tanh()

        def forward(self, x):
            y = self.act(self.layer(x))
            made.append(StorageWeakRef(y.untyped_storage()))
            return y.sum()

    gc.disable()  # a cycle would be found by it, in time; a step's memory must go at once
    try:
        found = ps.profile(Model(), torch.randn(ROWS, WIDTH), repeats=1)
        assert [storage.expired() for storage in made] == [True] * 4
    finally:
        gc.enable()
    assert found.total_bytes == SIZE


def test_what_a_checkpoint_drops_is_not_saved():
    class Model(nn.Module):
        def __init__(self, drop):
            super().__init__()
            self.inner, self.drop = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)), drop

        def forward(self, x):
            y = checkpoint(self.inner, x, use_reentrant=False) if self.drop else self.inner(x)
            return F.relu(y).sum()

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    kept, dropped = (ps.profile(Model(drop), x, repeats=1) for drop in (False, True))
    assert kept.total_bytes == ROWS * 64 * 4 + SIZE
    assert dropped.total_bytes == SIZE


def test_a_compiled_module_is_one_region_and_runs_compiled():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model = nn.Sequential(torch.compile(inner, backend=backend), nn.Sigmoid())
    found = ps.profile(model, torch.randn(ROWS, WIDTH), repeats=1)
    assert {tensor.region for tensor in found.tensors} == {"0", "1"}
    assert len(calls) == 1
    assert found.total_bytes == 2 * SIZE


def test_garbage_is_gone_before_the_allocator_is_asked(monkeypatch):
    """A model in a cycle, collected in the middle of forward, would be counted as memory that forward gave back."""

    class Cycle:
        def __init__(self):
            self.itself = self

    cycle, alive = Cycle(), []
    gone = weakref.ref(cycle)
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    monkeypatch.setattr(TensorRecorder, "_allocated", lambda self: alive.append(gone() is not None) or 0)
    gc.disable()
    try:
        del cycle
        ps.profile(model, x, loss=torch.sum, repeats=1)
    finally:
        gc.enable()
    assert alive[0] is False
