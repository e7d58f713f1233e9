"""Your own model and training loop: buffers with room for the worst case, of which only valid rows are stashed.

    python examples/own_loop.py

Trains twice from the same weights, with everything kept and with a stash, and compares losses and bytes. Then
proves for one batch that the stash changes no bit of a step.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import pagestash as ps


class Experts(nn.Module):
    """A projection over a worst-case buffer; only the device knows how many of its rows are valid."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        x = ps.rows(x, count)  # what is computed from it row by row has as many valid rows
        gate, value = self.up(x).chunk(2, dim=-1)
        y = self.down(F.silu(gate) * value)
        valid = torch.arange(len(x), device=x.device) < count
        return torch.where(valid[:, None], x + y, 0.0)


class Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(width) for _ in range(layers))

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, count)
        return x.square().sum() / (count * x.shape[1])


def train(policy: ps.Policy, *, steps: int, capacity: int, width: int) -> tuple[list[float], int]:
    """The losses, and the peak of bytes saved at the end of forward."""
    torch.manual_seed(0)
    model = Model(layers=4, width=width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keeper = ps.Keeper(policy, check=True).attach(model)  # which counts also where nothing moves
    losses, waiting = [], 0
    for _ in range(steps):
        # On average a quarter of the buffer. On a GPU the router computes this number, and it stays there.
        count = torch.randint(capacity // 8, 3 * capacity // 8, ())
        x = torch.randn(capacity, width)
        with keeper.step():  # around forward and backward; the rest of the loop is as it was
            loss = model(x, count)
            waiting = max(waiting, sum(int(size) for size in keeper.held().values()))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, waiting


def verify(policy: ps.Policy, *, capacity: int, width: int) -> ps.Verification:
    """Whether the stash changes a bit of anything that a step computes."""
    torch.manual_seed(0)
    model = Model(layers=4, width=width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(capacity, width), torch.tensor(capacity // 4)
    return ps.verify(model, batch, policy, optimizer=optimizer)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--width", type=int, default=128)
    shape = vars(parser.parse_args(arguments))
    stash = ps.Policy([ps.Rule("layers.*", "stash", min_bytes=0)], ps.PoolConfig(page="4KiB"))
    keep = ps.Policy([ps.Rule("layers.*", "keep")])
    (plain, kept), (stashed, packed) = train(keep, **shape), train(stash, **shape)
    print(f"losses equal to the last bit: {plain == stashed}")
    print(f"bytes that wait for backward: {kept:,} kept whole, {packed:,} with the stash")
    print(verify(stash, capacity=shape["capacity"], width=shape["width"]))


if __name__ == "__main__":
    main()
