"""Plain layers under offload, one training step, and a look at what is left after it."""

import gc

from torch import nn

import pagestash as ps
from pagestash.saved.offload.moving import Offload

RULE = {"min_bytes": 256}


def keeper_for(model, *rules, **pool) -> ps.Keeper:
    pool = {"page": 256, "headroom": 2.0, **pool}
    return ps.Keeper(ps.Policy(list(rules), ps.PoolConfig(**pool)), backend="torch").attach(model)


def moving(keeper) -> Offload:
    assert keeper._offload.plan is not None
    return keeper._offload


def nothing_left(keeper) -> None:
    gc.collect()
    offload = moving(keeper)
    offload.sweep()
    stats = keeper.stats()
    assert {home: size.bytes for home, size in stats.homes.items() if size.bytes} == {}
    assert offload.slabs.used == 0
    assert not offload._groups
    assert not offload.window.groups
    assert offload.window.resident == offload.window.leaving == offload.window.present == 0
    assert not offload.transfers._leaving
    if stats.pool is not None:
        assert stats.pool.device.in_use == 0


class MLP(nn.Module):
    """Plain layers of fixed size; `middle` saves its input and the activation's."""

    def __init__(self, depth: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )

    def forward(self, x, layers=None):
        for layer in self.layers if layers is None else [self.layers[i] for i in layers]:
            x = x + layer(x)
        return x.square().mean()


def losses_and_grads(model, batches, keeper=None, **kwargs):
    model.zero_grad()
    losses = []
    if keeper is None:
        for x in batches:
            loss = model(x, **kwargs)
            loss.backward()
            losses.append(loss.detach())
    else:
        with keeper.step():
            for x in batches:
                loss = model(x, **kwargs)
                loss.backward()
                losses.append(loss.detach())
    return losses, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
