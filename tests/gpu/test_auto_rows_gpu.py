"""`expected_rows="auto"` in a CUDA graph: captured again when the number changes, and bits of the same number."""

import pytest
import torch
from support import same
from torch import nn

import pagestash as ps
from pagestash.kernels.moe.ends import cut_bounds
from pagestash.kernels.moe.route import route
from pagestash.moe import MoE, MoEConfig, Received

pytestmark = pytest.mark.gpu
WIDTH, INNER, EXPERTS, TOP_K, TOKENS, DEPTH = 256, 128, 4, 2, 2048, 4  # heads of more bytes than gradients
AVERAGE = TOKENS * TOP_K


class Loopback:
    """A dispatch that brings as many of this rank's choices as the device says, with room for twice as many."""

    experts, capacity = EXPERTS, 2 * AVERAGE

    def send(self, x, ids, weights, over):
        arriving = torch.arange(ids.numel(), device=ids.device).view_as(ids) < self.rows
        routing = route(ids.masked_fill(~arriving, -1), EXPERTS, capacity=self.capacity, over=over)
        return Received(x, weights, ids, routing, "auto")

    def collect(self, slots, received):
        return slots

    def grow_capacity(self, *, headroom, alignment):
        return False


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = MoEConfig(
            width=WIDTH, expert_width=INNER, experts=EXPERTS, top_k=TOP_K, expected_rows="auto"
        )
        self.wires = [Loopback() for _ in range(DEPTH)]
        self.layers = nn.ModuleList(MoE(config, dispatch=wire) for wire in self.wires)

    def forward(self, x, rows):
        for index, (layer, wire) in enumerate(zip(self.layers, self.wires)):
            wire.rows = rows[index]
            y, _ = layer(x)
            x = x + y
        return x.float().square().mean()

    @property
    def expected(self) -> int:
        (number,) = {layer.experts.received_rows.expected for layer in self.layers}
        return number


def drawn(steps, low, high, seed=0):
    generator = torch.Generator().manual_seed(seed)
    share = low + (high - low) * torch.rand(steps, DEPTH, generator=generator)
    return list((share * AVERAGE).to(torch.int64))


def batches(rows):
    torch.manual_seed(3)
    return [(torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16), count.cuda()) for count in rows]


def made():
    torch.manual_seed(0)
    model = Stack().to(device="cuda", dtype=torch.bfloat16)
    # A power of two: the same in float32 on the device.
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-7, fused=True)

    def train_step(x, rows):
        loss = model(x, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, train_step


def in_a_graph(data, warmup=2, **leaves):
    """Losses, the model, the keeper, the stepper, and the number that each step ran with."""
    model, optimizer, train_step = made()
    rule = ps.Rule("layers.*.experts", "stash", min_bytes=0, **leaves)
    keeper = ps.Keeper(ps.Policy([rule], ps.PoolConfig(page="16KiB"))).attach(model)
    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer, warmup=warmup)
    losses, numbers = [], []
    for call, batch in enumerate(data):
        before = model.expected
        losses.append(step(*batch))
        numbers.append(before if call < 2 else model.expected)  # a warm-up step ends with the first choice
    step.wait()
    return losses, model, keeper, step, numbers


@pytest.mark.parametrize(
    "rows",
    [
        drawn(24, 0.5, 1.0),
        drawn(6, 0.2, 0.3) + drawn(40, 0.8, 1.0),
        drawn(40, 0.8, 1.0) + drawn(100, 0.1, 0.2),
    ],
    ids=["steady", "more", "fewer"],
)
@pytest.mark.parametrize("leaves", [{}, {"fraction": 1.0, "prefetch_bytes": 0}], ids=["stay", "leave"])
def test_a_graph_trains_to_the_bits_of_the_same_numbers_given_by_hand(rows, leaves):
    data = batches(rows)
    losses, model, keeper, _, numbers = in_a_graph(data, **leaves)
    other, _, train_step = made()
    plain = []
    for batch, number in zip(data, numbers):
        for layer in other.layers:
            layer.experts.received_rows.expected = number
        plain.append(train_step(*batch))
    assert same(losses, plain)
    assert same(list(model.parameters()), list(other.parameters()))
    stats = keeper.stats()
    assert (stats.overflow, stats.pool.device.in_use) == (False, 0)
    assert stats.expected_rows.rows == numbers[-1] > 0
    assert len(set(numbers[2:])) == 1 + stats.expected_rows.changes
    assert (stats.homes["offload"].peak > 0) == bool(leaves)


def test_rows_that_drift_change_the_number_and_the_pool():
    fewer = batches(drawn(40, 0.8, 1.0) + drawn(120, 0.1, 0.2))
    _, _, keeper, _, numbers = in_a_graph(fewer)
    assert numbers[3] > 0.5 * AVERAGE > numbers[-1]
    assert keeper.stats().expected_rows.changes >= 1
    steady = in_a_graph(batches(drawn(40, 0.8, 1.0)))[2]
    assert keeper.pool.device_pages <= steady.pool.device_pages


def test_rows_that_leave_need_two_steps_before_the_capture():
    with pytest.raises(ValueError, match="expected 2 or more"):
        in_a_graph(batches(drawn(3, 0.5, 1.0)), warmup=1, fraction=1.0)


def test_a_captured_log_counts_every_replay():
    ends = torch.tensor([3, 7, 7, 12], dtype=torch.int32, device="cuda")
    log = torch.zeros(1 + 1024, dtype=torch.int32, device="cuda")
    cut_bounds(ends, 5, log=log)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, excess = cut_bounds(ends, 5, log=log)
    for total in (20, 30):
        ends[-1] = total
        graph.replay()
    assert log[:4].tolist() == [3, 12, 20, 30]
    assert first.tolist() == [3, 5, 5, 5]
    assert excess.tolist() == [0, 2, 2, 25]


def test_a_read_does_not_wait_for_the_device():
    _, _, keeper, _, _ = in_a_graph(batches(drawn(4, 0.5, 1.0)))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    keeper.rows.read()
    busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert busy
