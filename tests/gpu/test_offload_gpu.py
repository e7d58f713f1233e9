"""Offload on a GPU: the same bits with either side of each hand-over held back, and memory that really goes."""

import gc
from contextlib import nullcontext

import pytest
import torch
from support import same
from support.faults import broken_arrival, broken_let_go
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import pagestash as ps
from pagestash.pages.host import host_slab
from pagestash.saved.home import Keep
from pagestash.saved.offload import transfers
from pagestash.saved.offload.measured import Outlook
from pagestash.saved.offload.moving import Offload
from pagestash.saved.offload.plan import OffloadPlan
from pagestash.saved.offload.split import RowSplit
from pagestash.saved.stash import Stash
from pagestash.saved.storage import Entry
from pagestash.saved.streams import SideStream

pytestmark = pytest.mark.gpu
WIDTH, TOKENS, DEPTH = 1024, 2048, 6
LAYER = TOKENS * (WIDTH + 4 * WIDTH + 4 * WIDTH) * 4
LONG = 20_000_000  # cycles: about 10 ms, far longer than any copy or layer here


class MLP(nn.Module):
    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(depth)
        )

    def forward(self, x):
        x = x * 1.0  # what the first layer saves is not the caller's
        for layer in self.layers:
            x = x + layer(x)
        # A head, where memory peaks, as the logits of a model do.
        return Head.apply(x)


class Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        logits = x.new_zeros(6 * LAYER // 4)
        ctx.save_for_backward(x * 2 / x.numel())
        return x.square().mean() + logits[0]

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad


@pytest.fixture
def model():
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    return MLP().cuda()


@pytest.fixture
def x():
    return torch.randn(TOKENS, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def keeper_for(model, prefetch=None, fraction=1.0, **pool):
    rule = ps.Rule("layers.*", "offload", prefetch_bytes=prefetch, fraction=fraction)
    return ps.Keeper(ps.Policy([rule], ps.PoolConfig(**pool))).attach(model)


def gradients(model, x, keeper=None):
    model.zero_grad(set_to_none=False)  # so that they are no part of any difference in memory
    if keeper is None:
        model(x).backward()
    else:
        with keeper.step():
            model(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("prefetch", [0, LAYER, None, 3 * LAYER])
def test_gradients_are_the_same_to_the_last_bit(model, x, prefetch):
    plain = gradients(model, x)
    keeper = keeper_for(model, prefetch)
    for _ in range(4):
        assert same(gradients(model, x, keeper), plain)
    assert keeper.stats().homes["offload"].peak > 0
    assert keeper.stats().homes["offload"].bytes == 0


@pytest.mark.parametrize("prefetch", [0, LAYER, None])
def test_in_a_graph_gradients_are_the_same_to_the_last_bit(model, x, prefetch):
    other = torch.randn_like(x)
    plain = [gradients(model, batch) for batch in (x, other, x)]
    keeper = keeper_for(model, prefetch)

    def train_step(batch):
        loss = model(batch)
        loss.backward()
        return loss

    step = ps.GraphedStep(train_step, keeper)
    for _ in range(2):
        step(x)
    for batch, expected in zip((x, other, x), plain):
        model.zero_grad()
        step(batch)
        step.wait()
        assert same([p.grad for p in model.parameters()], expected)
    assert keeper._offload.plan is not None


def test_tensors_with_valid_rows_in_a_graph():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(512, 1024, bias=False)
            self.down = nn.Linear(1024, 512, bias=False)

        def forward(self, x, rows):
            return self.down(torch.nn.functional.gelu(self.up(ps.rows(x, rows))))

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Experts() for _ in range(5))

        def forward(self, x, rows):
            for layer in self.layers:
                x = x + layer(x, rows)
            valid = torch.arange(x.shape[0], device=x.device) < rows
            return torch.where(valid[:, None], x, 0.0).square().sum()

    torch.manual_seed(0)
    model = Stack().cuda()
    x = torch.randn(8192, 512, device="cuda")
    counts = [torch.tensor([n], device="cuda") for n in (4000, 4000, 3000, 6000, 100, 8192)]

    def plain(rows):
        model.zero_grad()
        model(x, rows).backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = [plain(rows) for rows in counts]
    rule = ps.Rule("layers.*", "offload", prefetch_bytes=0)
    keeper = ps.Keeper(ps.Policy([rule])).attach(model)
    poisoned = x.clone()
    step = ps.GraphedStep(lambda x, rows: model(x, rows).backward(), keeper)
    for rows, right in zip(counts, expected):
        model.zero_grad()
        step(poisoned, rows)
        step.wait()
        assert same([p.grad for p in model.parameters()], right)
    assert step.reruns > 0  # 6000 rows were more than the pages that 4000 needed


# --- streams of the model's own ---


class Sides(nn.Module):
    """Its second module is on a stream of its own, as shared experts may be."""

    def __init__(self):
        super().__init__()
        self.routed, self.shared = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.stream = torch.cuda.Stream()

    def forward(self, x):
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            z = self.shared(x)
            x.record_stream(self.stream)
        y = self.routed(x)
        here.wait_stream(self.stream)
        z.record_stream(here)
        return (y + z).square().mean()


@pytest.mark.parametrize("home", ["offload", "stash"])
def test_a_second_stream_is_refused_where_tensors_of_both_move(x, home):
    model = Sides().cuda()
    keeper = ps.Keeper(ps.Policy([ps.Rule("*", home)])).attach(model)
    with pytest.raises(RuntimeError, match="saves tensors on another CUDA stream"):
        gradients(model, x, keeper)


@pytest.mark.parametrize("home", ["offload", "stash"])
def test_a_kept_region_may_have_a_stream_of_its_own(x, home):
    model = Sides().cuda()
    plain = gradients(model, x)
    keeper = ps.Keeper(ps.Policy([ps.Rule("routed", home)])).attach(model)
    for _ in range(3):
        assert same(gradients(model, x, keeper), plain)


def test_a_step_may_be_on_any_stream(model, x):
    plain = gradients(model, x)
    keeper, side = keeper_for(model, LAYER), torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side, side, torch.cuda.current_stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            assert same(gradients(model, x, keeper), plain)


# --- one side held back -------------------------------------------------------------------------------------


def hold_back(monkeypatch, which):
    """Everything that the out or in stream does comes late."""
    entered = SideStream.after

    def late(self, *events):
        with torch.cuda.stream(self._stream):
            if self._late:
                torch.cuda._sleep(LONG)
        return entered(self, *events)

    monkeypatch.setattr(SideStream, "_late", False, raising=False)
    monkeypatch.setattr(SideStream, "after", late)
    return lambda keeper: setattr(getattr(keeper._offload.transfers, which), "_late", True)


@pytest.mark.parametrize("which", ["_out", "_in"])
@pytest.mark.parametrize("prefetch", [0, LAYER])
def test_a_side_stream_that_is_late_changes_nothing(model, x, monkeypatch, which, prefetch):
    plain = gradients(model, x)
    keeper = keeper_for(model, prefetch)
    gradients(model, x, keeper)
    hold_back(monkeypatch, which)(keeper)
    for _ in range(2):
        assert same(gradients(model, x, keeper), plain)


def test_a_compute_stream_that_is_late_changes_nothing(model, x):
    plain = gradients(model, x)
    keeper = keeper_for(model, LAYER)
    gradients(model, x, keeper)
    for layer in model.layers:
        layer[1].register_forward_hook(lambda *_: torch.cuda._sleep(LONG // 10))
        layer[1].register_full_backward_hook(lambda *_: torch.cuda._sleep(LONG // 10))
    assert same(gradients(model, x, keeper), plain)


@pytest.mark.parametrize(
    ("which", "fault"),
    [("_out", broken_let_go), ("_in", broken_arrival)],
    ids=["source let go early", "read before its copy back"],
)
def test_without_the_event_the_late_stream_would_be_noticed(model, x, monkeypatch, which, fault):
    plain = gradients(model, x)
    keeper = keeper_for(model, 0)
    gradients(model, x, keeper)
    hold_back(monkeypatch, which)(keeper)
    fault(monkeypatch)
    assert not same(gradients(model, x, keeper), plain)
    torch.cuda.synchronize()


@pytest.mark.parametrize("prefetch", [0, None])
def test_events_of_groups_that_are_over_mark_later_ones(model, x, prefetch):
    plain = gradients(model, x)
    keeper = keeper_for(model, prefetch)
    for _ in range(6):
        assert same(gradients(model, x, keeper), plain)
    transfers = keeper._offload.transfers
    for side in (transfers._out, transfers._in):
        assert 0 < len(side._unused) <= len(model.layers) + 1  # one for each group at a time, and one to join


def alone(size: int) -> Offload:
    """Offload by a plan, without a keeper, whose host memory holds one tensor of `size` bytes."""
    policy, keep = ps.Policy([ps.Rule("r", "offload")], ps.PoolConfig(host=size)), Keep()
    home = Offload(policy, keep, Stash(policy, keep, "auto"), lambda: None)
    plan = OffloadPlan({}, window=4 * size)  # room for copies under way
    home.begin(Outlook(plan, RowSplit({}), host_bytes=size, pages=0), torch.device("cuda", 0))
    return home


def entry_of(tensor: torch.Tensor) -> Entry:
    return Entry(
        storage=StorageWeakRef(tensor.untyped_storage()),
        version=tensor._version,
        first=0,
        last=tensor.nbytes,
        origin=tensor,
        handles=1,
        waiting=1,
        region="r",
        rule=ps.Rule("r", "offload"),
    )


@pytest.mark.parametrize("right", [True, False], ids=["with the event", "without the event"])
def test_a_copy_back_does_not_start_before_its_copy_out_is_done(right):
    home, size = alone(64 << 20), 64 << 20
    home.slabs._slabs[0].zero_()
    entry = entry_of(torch.full((size,), 1, dtype=torch.uint8, device="cuda"))
    with torch.cuda.stream(home.transfers._out._stream):
        torch.cuda._sleep(LONG)
    home.put([entry])
    if not right:
        entry.place.left = None
    home._fetch(entry.place)
    home._take_in(entry.place)
    came_back = entry.place.restored[entry].clone()
    torch.cuda.synchronize()
    arrived_whole = bool((came_back == 1).all())  # a bare assert would print the tensor
    assert arrived_whole is right


@pytest.mark.parametrize("right", [True, False], ids=["with the event", "without the event"])
def test_host_memory_is_not_written_before_its_copy_back_is_done(monkeypatch, right):
    """The first tensor is on its way back, late, when its host memory goes to the second."""
    size = 64 << 20
    home = alone(size)
    first = entry_of(torch.full((size,), 1, dtype=torch.uint8, device="cuda"))
    second = entry_of(torch.full((size,), 2, dtype=torch.uint8, device="cuda"))
    home.put([first])
    with torch.cuda.stream(home.transfers._in._stream):
        torch.cuda._sleep(LONG)
    home._fetch(first.place)
    arriving = first.place.incoming[first]
    first.place.drop(first)
    if not right:
        monkeypatch.setattr(transfers, "wait_here", lambda event: None)
    home.put([second])
    assert second.place.extent is not None  # the only one there is
    torch.cuda.synchronize()
    untouched = bool((arriving == 1).all())
    assert untouched is right


@pytest.mark.parametrize("right", [True, False], ids=["outlived", "not outlived"])
def test_a_late_copy_back_that_outlives_its_home_writes_to_nobody_elses_memory(monkeypatch, right):
    """Its graph is freed when the keeper is gone, so that nobody waits for the copy."""
    size = 64 << 20
    home = alone(size)
    entry = entry_of(torch.full((size,), 1, dtype=torch.uint8, device="cuda"))
    home.put([entry])
    home.settle()
    with torch.cuda.stream(home.transfers._in._stream):
        torch.cuda._sleep(LONG)
    home._fetch(entry.place)
    assert list(entry.place.incoming) == [entry]
    if not right:
        monkeypatch.setattr(SideStream, "outlive", lambda self, buffers: None)
    entry.place.drop(entry)
    slabs = home.slabs  # to unpin them would wait for the device
    del home
    # Among the memory that the allocator hands on first is all that was freed.
    others = [torch.full((size,), 2, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    untouched = all(bool((other == 2).all()) for other in others)
    del slabs
    assert untouched is right


def test_a_side_stream_follows_compute_before_in_and_after_a_capture():
    """It takes up the compute stream's present by one event, which a capture records as well."""
    side, device = SideStream(torch.device("cuda", 0)), torch.device("cuda", 0)
    source = torch.zeros(1 << 20, device=device)
    copy = torch.empty_like(source)

    def late_work():
        torch.cuda._sleep(LONG // 10)
        source.add_(1)
        before = torch.cuda.current_stream(device)
        with side.after():
            assert torch.cuda.current_stream(device) != before
            copy.copy_(source)
        assert torch.cuda.current_stream(device) == before
        side.join()

    late_work()
    assert bool((copy == 1).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        late_work()
    for count in (2, 3):
        graph.replay()
        assert bool((copy == count).all())
    late_work()
    assert bool((copy == 4).all())
    graph.replay()
    assert bool((copy == 5).all())


def test_transposed_tensors_come_back_to_the_last_bit():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(256, 768)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).transpose(1, 3).unbind(2)
            return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(Heads() for _ in range(4))}).cuda()
    x = torch.randn(8, 128, 256, device="cuda")

    def run(keeper=None):
        model.zero_grad()
        with keeper.step() if keeper is not None else nullcontext():
            sum(layer(x).square().mean() for layer in model["layers"]).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = run()
    rule = ps.Rule("layers.*", "offload", min_bytes=0, prefetch_bytes=0)
    keeper = ps.Keeper(ps.Policy([rule])).attach(model)
    for _ in range(4):
        assert same(run(keeper), plain)


# --- memory -------------------------------------------------------------------------------------------------


def peak(run) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("prefetch", [LAYER, 2 * LAYER, None])
def test_peak_memory_falls_by_the_bytes_that_moved(model, x, prefetch):
    gradients(model, x)
    before = peak(lambda: model(x).backward())
    keeper = keeper_for(model, prefetch)
    for _ in range(2):
        gradients(model, x, keeper)

    def step():
        with keeper.step():
            model(x).backward()

    after = peak(step)
    moved = keeper.stats().homes["offload"].peak
    assert moved == (DEPTH - (3 if prefetch is None else prefetch // LAYER)) * LAYER
    assert before - after >= 0.99 * moved


def test_pinned_memory_is_what_lives_in_it(model, x):
    keeper = keeper_for(model, LAYER)
    for tokens in (TOKENS, TOKENS - 100, TOKENS // 2 + 3, TOKENS - 17):
        for _ in range(2):
            gradients(model, x[:tokens], keeper)
    stats = keeper.stats()
    most = stats.homes["offload"].peak
    keeper.reset_peaks()
    gradients(model, x, keeper)
    most = keeper.stats().homes["offload"].peak
    assert most <= stats.offload.host_bytes <= 1.03 * most
    assert stats.offload.refused_peak == 0


def test_to_unpin_host_memory_waits_for_the_copies_that_read_it():
    """A home that ends leaves that to the driver: its finalizer may run in a capture, and must not wait itself."""
    size, side, copied = 64 << 20, torch.cuda.Stream(), torch.cuda.Event()
    target = torch.zeros(size, dtype=torch.uint8, device="cuda")
    slab = host_slab(size, torch.device("cuda", 0)).fill_(3)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        target.copy_(slab, non_blocking=True)
        copied.record()
    assert not copied.query()
    del slab
    assert copied.query()
    torch.cuda.synchronize()
    arrived_whole = bool((target == 3).all())
    assert arrived_whole
