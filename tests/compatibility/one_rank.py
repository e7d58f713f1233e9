"""Training in one process, one function a feature: each takes a home, or None, and trains the same each time.

It returns what must not differ by a bit, losses and weights, and the keeper.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import pagestash as ps

WIDTH, ROWS, STEPS = 32, 16, 3
Trained = tuple[Any, ps.Keeper]


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def policy_of(home: str | None, match: str = "layers.*") -> ps.Policy:
    moving = {"stash": {"min_bytes": 0}, "offload": {"min_bytes": 0, "prefetch_bytes": 0}, "recompute": {}}
    rules = [] if home is None else [ps.Rule(match, home, **moving[home])]
    return ps.Policy(rules, ps.PoolConfig(page="4KiB", headroom=1.0))


def seeded() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(steps: int = STEPS, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(steps)]


def loop(
    model: nn.Module,
    home: str | None,
    *,
    match: str = "layers.*",
    around: Any = nullcontext,
    accumulate: int = 1,
    scaler: Any = None,
    seed: int = 1,
) -> Trained:
    """A user's loop around `model`."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    keeper = ps.Keeper(policy_of(home, match)).attach(model)
    losses = []
    for number, x in enumerate(batches(STEPS * accumulate, seed)):
        with keeper.step():
            with around():
                loss = model(x).float().square().mean() / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
        losses.append(loss.detach().clone())
        if (number + 1) % accumulate:
            continue
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return (losses, [local(each) for each in model.parameters()]), keeper


def local(parameter: torch.Tensor) -> torch.Tensor:
    return getattr(parameter, "to_local", lambda: parameter)().detach().clone()


def float32(home: str | None) -> Trained:
    return loop(seeded(), home)


def autocast(home: str | None) -> Trained:
    return loop(seeded(), home, around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))


def grad_scaler(home: str | None) -> Trained:
    def half() -> Any:
        return torch.autocast("cpu", dtype=torch.float16)

    return loop(seeded(), home, around=half, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))


def accumulation(home: str | None) -> Trained:
    return loop(seeded(), home, accumulate=2)


def lora(home: str | None) -> Trained:
    import peft

    adapters = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    return loop(peft.get_peft_model(seeded(), adapters), home)


def checkpointing(home: str | None) -> Trained:
    """`torch.utils.checkpoint` inside of the regions: each checkpoints a part of itself."""
    model = seeded()
    for layer in model.layers:
        layer.up = checkpoint_wrapper(layer.up)
        layer.norm = checkpoint_wrapper(layer.norm)
    return loop(model, home)


def checkpointed_regions(home: str | None) -> Trained:
    """`torch.utils.checkpoint` around the regions: what it saves itself, their inputs, moves."""
    model = seeded()
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)
    return loop(model, home)


def compiled_layers(home: str | None) -> Trained:
    model = seeded()
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend="aot_eager")
    return loop(model, home)


def compiled_in_place(home: str | None) -> Trained:
    """As torchtitan compiles its blocks."""
    model = seeded()
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return loop(model, home)


def compiled_around(home: str | None) -> Trained:
    """Rules for parts of what is compiled."""
    return loop(torch.compile(seeded(), backend="aot_eager"), home)
