"""`ps.verify` on a GPU: eager steps and CUDA graphs, equal and not."""

import pytest
import torch
from torch import nn

import pagestash as ps

pytestmark = pytest.mark.gpu
WIDTH = 64


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + torch.dropout(self.norm(self.linear(x)).tanh(), 0.3, True)


class CountsItself(Layer):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def forward(self, x):
        self.seen.add(len(self.seen))
        return super().forward(x) * (1 + 0.1 * len(self.seen))


@pytest.mark.parametrize("graphed", [False, True])
def test_steps_are_equal_and_everything_is_as_it_was(graphed):
    model = nn.Sequential(*(Layer() for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(32, WIDTH, device="cuda")
    state = (*model.parameters(), *model.buffers(), torch.cuda.get_rng_state())
    before = [tensor.detach().clone() for tensor in state]
    policy = ps.Policy([ps.Rule("{0-1}", "stash", min_bytes=0), ps.Rule("*", "recompute")])
    report = ps.verify(model, batch, policy, optimizer=optimizer, graphed=graphed, steps=4)
    assert report.equal, report
    assert report.moved["stash"] > 0
    after = [*model.parameters(), *model.buffers(), torch.cuda.get_rng_state()]
    assert all(torch.equal(own, other) for own, other in zip(before, after))
    assert not optimizer.state
    assert "found_inf" not in vars(optimizer)
    assert not any(group["capturable"] for group in optimizer.param_groups)
    model(batch).sum().backward()
    optimizer.step()  # no hook of a step that is over is left


def test_a_difference_is_found():
    model = nn.Sequential(Layer(), CountsItself()).cuda()
    report = ps.verify(model, torch.randn(32, WIDTH, device="cuda"), ps.Policy([ps.Rule("*", "recompute")]))
    assert not report.equal
    assert report.refused or report.regions == ("1",)
