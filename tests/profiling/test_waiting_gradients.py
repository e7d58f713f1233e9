"""Gradients that a split backward holds between its halves."""

import torch
from torch import nn

import pagestash as ps
from pagestash.profiling.split_backward import parting_nodes

ROWS, WIDTH = 8, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def test_the_second_half_begins_at_the_nodes_that_have_weights():
    x, layer = torch.randn(ROWS, WIDTH, requires_grad=True), Layer()
    found = parting_nodes(layer(x).sum(), {id(x)})
    assert sorted(node.name() for node in found) == [
        "AddmmBackward0",
        "AddmmBackward0",
        "NativeLayerNormBackward0",
    ]


def test_a_weight_that_is_computed_parts_where_it_is_used():
    x, weight = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH, requires_grad=True)
    (found,) = parting_nodes((x @ (2.0 * weight).T).sum(), {id(x)})
    assert found.name() == "MmBackward0"


def test_each_such_gradient_waits_from_the_backward_of_its_region_on():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    model = nn.Sequential(Layer(), Layer())
    profile = ps.profile(model, x, loss=lambda output: output.square().mean(), repeats=1)
    waiting = {}
    for segment in profile.segments:
        assert segment.way == "backward" or not segment.waiting_bytes
        waiting[segment.region] = waiting.get(segment.region, 0) + segment.waiting_bytes
    size = x.nbytes
    for number in "01":
        assert waiting[f"{number}.up"] == 4 * size
        assert waiting[f"{number}.down"] == waiting[f"{number}.norm"] == size


def test_a_batch_that_wants_no_gradient_has_nothing_to_split():
    profile = ps.profile(nn.Sequential(Layer(), Layer()), torch.randn(ROWS, WIDTH), repeats=1)
    assert not any(segment.waiting_bytes for segment in profile.segments)
