"""What a keeper costs the host: a step that is bound by launches pays for it.

Measured on a chain of small modules whose kernels take no longer than their launches. In a model's own step the
host waits for the device now and then, and such a wait is many times what a keeper costs.
"""

import statistics
import time
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from pagestash.policy import Policy, Rule
from pagestash.saved.keeper import Keeper

WARM, ROUNDS = 4, 12
REGIONS, WIDTH = 16, 64


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of the host."""

    pack: float = 0.0
    """A saved tensor that stays, in forward."""
    unpack: float = 0.0
    """The same in backward."""
    record: float = 0.0
    """A recomputed region in forward."""
    replay: float = 0.0
    """The same in backward, beside the region's own forward."""
    put: float = 0.0
    """A group that is moved, in forward."""
    get: float = 0.0
    """The same in backward."""


class _Small(nn.Module):
    """Saves its input, and one tensor of its own."""

    saves = 2

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        # A keeper moves what is on the device of its model's parameters.
        self.here = nn.Parameter(torch.zeros((), device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(nn.functional.silu(x))


def measure_overhead(device: torch.device) -> Overhead:
    """Run a chain of regions without a keeper, and under keepers that keep, recompute and move every second one."""
    chain = nn.Sequential(
        OrderedDict((f"{kind}{at}", _Small(device)) for at in range(REGIONS) for kind in ("other", "region"))
    )
    alone = _launched(chain, device, None)
    kept = _launched(chain, device, Rule("region0", "keep"))
    recomputed = _launched(chain, device, Rule("region*", "recompute", min_bytes=1))
    moved = _launched(chain, device, Rule("region*", "offload", min_bytes=1, prefetch_bytes=0))

    pack, unpack = _each(kept, alone, _Small.saves * len(chain))
    record, replay = _each(recomputed, kept, REGIONS)
    put, get = _each(moved, kept, REGIONS)
    return Overhead(pack, unpack, record, max(0.0, replay - alone[0] / len(chain)), put, get)


def _each(seconds: tuple[float, float], others: tuple[float, float], count: int) -> tuple[float, float]:
    """What forward and backward take more than others, for one of so many."""
    forward, backward = (max(0.0, (one - other) / count) for one, other in zip(seconds, others))
    return forward, backward


def _launched(chain: nn.Module, device: torch.device, rule: Rule | None) -> tuple[float, float]:
    """The host's seconds of forward and backward, under a keeper with one rule or without: the medians."""
    x = torch.zeros(WIDTH, WIDTH, device=device, requires_grad=True)
    # (`check`: every step is watched, also those of a keeper that moves nothing.)
    keeper = None if rule is None else Keeper(Policy([rule]), check=True).attach(chain)
    times = []
    try:
        for _ in range(WARM + ROUNDS):
            x.grad = None
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            with nullcontext() if keeper is None else keeper.step():
                begin = time.perf_counter()
                loss = chain(x).sum()
                turn = time.perf_counter()
                loss.backward()
                times.append((turn - begin, time.perf_counter() - turn))
    finally:
        if keeper is not None:
            keeper.detach()
    forward, backward = zip(*times[WARM:])
    return statistics.median(forward), statistics.median(backward)
