"""A whole training step in one CUDA graph, and what happens when the pool turns out too small.

    python examples/graphed_step.py

On a machine without a GPU the same class runs the step eagerly, with the same recovery.
"""

import argparse

import torch
from torch import nn

import pagestash as ps


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(ps.rows(x, count))))
        valid = torch.arange(len(x), device=x.device) < count
        return torch.where(valid[:, None], x + y, 0.0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--width", type=int, default=64)
    asked = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(Layer(asked.width) for _ in range(4))}).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rule = ps.Rule("layers.*", "stash", min_bytes=0)
    keeper = ps.Keeper(ps.Policy([rule], ps.PoolConfig(page="4KiB"))).attach(model)

    def train_step(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        for layer in model["layers"]:
            x = layer(x, count)
        loss = x.square().sum() / (count * x.shape[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)  # two steps measure, then it captures
    losses = []
    for number in range(asked.steps):
        # The pool is sized for the first steps; later steps have more rows.
        rows = asked.capacity // 8 if number < asked.steps // 2 else asked.capacity // 2
        count = torch.tensor(rows, device=device)
        losses.append(step(torch.randn(asked.capacity, asked.width, device=device), count))
    step.wait()  # losses are final now
    assert keeper.pool is not None
    print(f"losses: {', '.join(f'{loss.item():.4f}' for loss in losses)}")
    print(f"batches run again because the pool was too small: {step.reruns}")
    print(f"pages of the pool now: {keeper.pool.device_pages}")


if __name__ == "__main__":
    main()
