"""Under a split backward the experts' weight gradients are computed in its second half, once."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from pagestash.kernels.gemm import grouped
from pagestash.moe import MoE, MoEConfig
from pagestash.moe.saving import Half
from pagestash.pages.pool import PagePool
from pagestash.pipeline import Action
from pagestash.pipeline.split_backward import _Telling, delay_weight_gradients
from pagestash.train.prepare import splits_backward

CONFIG = MoEConfig(width=32, expert_width=16, experts=4, top_k=2, shared_experts=1, balance_loss=0.01)


class Layer(nn.Module):
    def __init__(self, pooled):
        super().__init__()
        torch.manual_seed(0)
        pool = PagePool(torch.device("cpu"), 1024, device_pages=256, backend="torch") if pooled else None
        self.before, self.moe = nn.Linear(32, 32), MoE(CONFIG, pool=pool)

    def forward(self, x):
        y, aux = self.moe(self.before(x))
        return y.sum() + aux


@pytest.fixture
def products(monkeypatch):
    """Grouped products so far, in a list of one number."""
    count, inner = [0], grouped.grouped_mm

    def counted(*args):
        count[0] += 1
        return inner(*args)

    monkeypatch.setattr(grouped, "grouped_mm", counted)
    return count


def split_backward(layer, half, products):
    """Gradients, and the grouped products of each half."""
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    told = _Telling({1: half})
    for module in layer.modules():
        if half is not None and hasattr(module, "use_half"):
            module.use_half(half)
    loss = layer(x)
    counts = []
    for kind in "IW":
        before = products[0]
        if half is not None:
            told.begin(Action(kind, 1, 0))
        if kind == "I":
            (dx,), groups = stage_backward_input([loss], None, [x], layer.parameters())
        else:
            stage_backward_weight(layer.parameters(), groups)
        if half is not None:
            told.end(Action(kind, 1, 0))
        counts.append(products[0] - before)
    return [dx, *(value.grad for value in layer.parameters())], counts


@pytest.mark.skipif(not splits_backward(), reason="this torch cannot split a custom function's backward")
@pytest.mark.parametrize("pooled", [False, True])
def test_gradients_are_those_of_a_whole_backward_with_fewer_products(pooled, products):
    whole = Layer(pooled)
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    whole(x).backward()
    expected = [x.grad, *(value.grad for value in whole.parameters())]
    twice, both = split_backward(Layer(pooled), None, products)
    once, halves = split_backward(Layer(pooled), Half(), products)
    for ours, plain, value in zip(once, twice, expected, strict=True):
        assert torch.equal(ours, value)
        assert torch.equal(plain, value)
    again = int(pooled)  # the product that recomputes rows of missing pages: launched, and empty
    # Of the routed experts: the activation's gradient in both halves; then the input's, then both weights'.
    assert both == [4 + again, 4 + again]
    assert halves == [2 + again, 3 + again]


def test_the_first_stage_does_everything_in_its_second_half():
    half = Half()
    told = _Telling({0: half, 3: Half()})
    told.begin(Action("W", 0, 0))
    assert half == Half(inputs=True, weights=True)


def test_it_is_given_to_the_experts_of_every_stage():
    class Numbers:
        forward_one_chunk = backward_one_chunk = backward_weight_one_chunk = None

        def __init__(self, index, module):
            self.stage_index, self.num_stages, self.group_size, self.group_rank = index, 4, 2, 0
            self.submod, self.is_last = module, index == 3

    first, last = Layer(False), Layer(False)
    stages = [Numbers(0, first), Numbers(3, last)]
    delay_weight_gradients(ScheduleZBVZeroBubble(stages, 4, loss_fn=len))
    assert first.moe.experts.backward_half is first.moe.shared_experts.backward_half is not None
    assert last.moe.experts.backward_half is not first.moe.experts.backward_half
