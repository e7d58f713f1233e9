"""Marks on a GPU, where other operations are fused: the same gradients eagerly and in a graph, and fewer bytes."""

import pytest
import torch
from support import same
from torch import nn
from torch.nn import functional as F

import pagestash as ps

pytestmark = pytest.mark.gpu
ROWS, WIDTH, INNER = 1024, 128, 256


class Experts(nn.Module):
    def __init__(self, grouped: bool, dropout: float) -> None:
        super().__init__()
        self.grouped, self.dropout = grouped, dropout
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Parameter(torch.randn(2, WIDTH, 2 * INNER) * 0.05)
        self.down = nn.Parameter(torch.randn(2, INNER, WIDTH) * 0.05)

    def multiply(self, x, weight, count):
        if not self.grouped:
            return x @ weight[0]
        return F.grouped_mm(x, weight, offs=torch.stack([count // 2, count]).to(torch.int32))

    def forward(self, x, count):
        valid = (torch.arange(ROWS, device=x.device) < count)[:, None]
        # The grouped product leaves garbage in its input's gradient, which `where` keeps from going further.
        x = ps.rows(torch.where(valid, self.norm(x), 0.0), count)
        gate, value = self.multiply(x, self.up, count).chunk(2, dim=-1)
        y = self.multiply(F.dropout(F.silu(gate) * value, self.dropout), self.down, count)
        return torch.where(valid, y, 0.0)


class Stack(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(**options) for _ in range(3))

    def forward(self, x, count):
        for layer in self.layers:
            x = x + layer(x, count)
        return x.float().square().mean()


def counts():
    return [torch.tensor(n, device="cuda") for n in (200, 200, 100, 300)]


def expected(model, x, numbers):
    found = []
    for count in numbers:
        model.zero_grad()
        torch.manual_seed(3)
        model(x, count).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


@pytest.fixture(params=[False, True], ids=["plain", "grouped"])
def grouped(request):
    if request.param and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("grouped_mm needs sm90")
    return request.param


def made(grouped, dropout):
    torch.manual_seed(0)
    model = Stack(grouped=grouped, dropout=dropout).cuda().bfloat16()
    return model, torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("home", ["stash", "offload"])
def test_gradients_and_bytes_of_marked_buffers(grouped, home, monkeypatch):
    model, x = made(grouped, 0.1)
    numbers = counts()
    right = expected(model, x, numbers)
    held = []
    for marked in (True, False):
        if not marked:
            monkeypatch.setattr(ps, "rows", lambda x, n: x)
        late = {"prefetch_bytes": 0} if home == "offload" else {}
        rule = ps.Rule("layers.*", home, min_bytes=0, **late)
        keeper = ps.Keeper(ps.Policy([rule]), check=True).attach(model)
        for count, gradients in zip(numbers, right):
            model.zero_grad()
            torch.manual_seed(3)
            keeper.reset_peaks()
            with keeper.step():
                model(x, count).backward()
            assert same([p.grad for p in model.parameters()], gradients)
        held.append(keeper.stats().homes["stash"].peak + keeper.stats().homes["offload"].peak)
        keeper.detach()
    assert held[0] < 0.7 * held[1]


def test_marked_buffers_in_a_graph(grouped):
    model, x = made(grouped, 0.0)
    numbers = counts()
    right = expected(model, x, numbers)
    keeper = ps.Keeper(ps.Policy([ps.Rule("layers.*", "stash", min_bytes=0)])).attach(model)
    step = ps.GraphedStep(lambda x, count: model(x, count).backward(), keeper)
    for count, gradients in zip([*numbers, *numbers], [*right, *right]):
        model.zero_grad()
        step(x, count)
        step.wait()
        assert same([p.grad for p in model.parameters()], gradients)
