"""A small model for the keeper's tests: a stack of gated layers with worst-case buffers."""

import gc

import torch
from torch import nn

import pagestash as ps

WIDTH, INNER, CAPACITY = 32, 48, 64
POOLS = {
    "measured": {},
    "spilling": {"device": 256 * 20, "host": "1MiB"},
    "host only": {"device": 256, "host": "1MiB"},
}


class Experts(nn.Module):
    """A gated projection whose rows past `rows` are garbage."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x, rows):
        gate, value = self.up(ps.rows(x, rows)).chunk(2, dim=-1)
        return self.down(torch.nn.functional.silu(gate) * value)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = Experts()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, rows):
        return x + self.dropout(self.experts(self.norm(x), rows))


class Stack(nn.Module):
    """The loss is over valid rows only, so the gradient of every tail row is zero."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, rows):
        self.seen += 1
        for layer in self.layers:
            x = layer(x, rows)
        valid = torch.arange(x.shape[0], device=x.device) < rows
        return torch.where(valid[:, None], x, 0.0).square().sum()


def policy(**pool) -> ps.Policy:
    """Stash the experts in small pages, however small the tensor."""
    return ps.Policy(
        rules=[ps.Rule("layers.*.experts", "stash", min_bytes=256)], pool=ps.PoolConfig(page=256, **pool)
    )


def batch(rows: int, seed: int = 0, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(CAPACITY, WIDTH, generator=generator)
    return x.to(device), torch.tensor(rows, device=device)


def run(model, x, rows, keeper=None):
    """Loss and gradients of one step, with a keeper or without."""
    model.zero_grad()
    torch.manual_seed(1)
    if keeper is None:
        loss = model(x, rows)
        loss.backward()
    else:
        with keeper.step():
            loss = model(x, rows)
            loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def in_use(keeper: ps.Keeper) -> int:
    """Pages in use; no byte may wait in any home."""
    gc.collect()
    stats = keeper.stats()
    assert stats.pool is not None
    assert stats.homes["keep"].bytes == 0
    assert stats.pool.valid_bytes == 0
    return stats.pool.device.in_use + stats.pool.host.in_use
