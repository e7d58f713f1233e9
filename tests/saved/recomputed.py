"""Small modules that count their forwards, and one training step, for the tests of recompute."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import pagestash as ps

F = torch.nn.functional
WIDTH, ROWS = 16, 8


class Log:
    """Counts replays, too: contents of a list would be as if there had been none."""

    def __init__(self) -> None:
        self.all: list = []

    def append(self, value) -> None:
        self.all.append(value)

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, at):
        return self.all[at]

    def __iter__(self):
        return iter(self.all)


class Counted(nn.Module):
    """Counts its forwards, and watches the storages that its operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Log()
        self.made = Log()

    @property
    def forwards(self) -> int:
        return len(self.calls)

    @forwards.setter
    def forwards(self, count: int) -> None:
        self.calls.all[:] = [None] * count

    def see(self, tensor):
        self.made.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def alive(self) -> list[bool]:
        return [not ref.expired() for ref in self.made]


class MLP(Counted):
    def __init__(self, inner: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        self.calls.append(None)
        h = self.see(self.up(x))
        a = self.see(F.silu(h))
        return self.see(self.down(self.dropout(a)))


class Square(Counted):
    """Saves its input, and nothing else."""

    def forward(self, x):
        self.calls.append(None)
        return self.see(x.square())


def keep(model, *rules, homes=None, **pool) -> ps.Keeper:
    rules = [rule if isinstance(rule, ps.Rule) else ps.Rule(rule, "recompute") for rule in rules]
    return ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=256, **pool)), backend="torch").attach(model)


def step(model, x, keeper=None, loss=lambda out: out.square().sum(), seed=1):
    """The loss and all gradients, the input's too."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(seed)
    if keeper is None:
        value = loss(model(x))
        value.backward()
    else:
        with keeper.step():
            value = loss(model(x))
            value.backward()
    after = torch.rand(())  # the random state goes on as if nothing had been run again
    return [
        value.detach(),
        after,
        x.grad,
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
    ]


def empty(keeper: ps.Keeper) -> bool:
    stats = keeper.stats()
    return all(home.bytes == 0 for home in stats.homes.values())


X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


class Norm(nn.Module):
    """Changes buffers in forward, in place and by taking another tensor, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer("large", torch.zeros(32768))
        self.register_buffer("quiet", torch.zeros(32768))

    def forward(self, x):
        self.quiet.numpy()[0] += 1  # as a kernel would that counts no version
        self.seen += 1
        y = self.batch(x) * self.seen.clone() + self.last
        self.last = x.detach().mean(0)
        self.large[0] += 1
        return (y * self.large[0].clone()).sin()


@dataclass
class Batch:
    x: torch.Tensor
    scale: float
    extra: dict


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


# --- decisions ---


class Routed(Counted):
    """A layer that routes by a random choice, counts, and computes on what it received."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.work = nn.Linear(WIDTH, 4), MLP(dropout=0.2)
        self.routed = 0

    def route(self, x):
        self.routed += 1
        scores = self.gate(x)
        chosen = (scores + torch.randn(ROWS, 4)).argmax(1)
        return Batch(scores.softmax(1), 1.0, {"ids": chosen})

    def forward(self, x):
        self.calls.append(None)
        routing = ps.once(lambda: self.route(x))
        order = routing.extra["ids"].argsort(stable=True)
        weight = routing.x.gather(1, routing.extra["ids"][:, None])
        rows = ps.once(lambda: x[order] * 2)
        return self.work(rows).sin() * weight
