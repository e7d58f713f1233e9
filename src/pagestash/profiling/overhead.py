"""What a keeper costs the host: a step that is bound by launches pays for it.

Each cost is measured on a chain of small modules whose kernels take no longer than their launches. Between a
model's own launches the same Python code is slower: it is no longer in the processor's caches. How much slower is
measured in the model's forward, in which the host never waits for the device. (In its backward it may, and such a
wait is many times what a keeper costs.) A group that moves mostly costs calls of the driver, which are as they are:
with them slower too, a step that offloads was predicted 11 % too long, and plans kept away from offload.
"""

import re
import statistics
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace

import torch
from torch import nn

from pagestash.policy import Policy, Rule
from pagestash.profiling.records import Region
from pagestash.profiling.steps import RepeatedStep
from pagestash.saved.keeper import Keeper

WARM, ROUNDS = 4, 7
TURNS = 2
"""How often each way is measured, in turn with the others. Its fastest turn counts: a host is slow at times."""
REGIONS, WIDTH = 16, 64
INSIDE = 8
"""Modules inside a region, to see what each of them costs."""


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
    record_module: float = 0.0
    """A module inside a recomputed region, in forward."""
    replay_module: float = 0.0
    """The same in backward."""

    def scaled(self, factor: float) -> "Overhead":
        return Overhead(*(factor * own for own in astuple(self)))


class _Small(nn.Module):
    """Saves its input, and one tensor of its own."""

    saves = 2

    def __init__(self, device: torch.device, inside: int = 0) -> None:
        super().__init__()
        # A keeper moves what is on the device of its model's parameters.
        self.here = nn.Parameter(torch.zeros((), device=device), requires_grad=False)
        self.inside = nn.ModuleList(_Nothing(device) for _ in range(inside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.inside:
            x = module(x)
        return nn.functional.silu(nn.functional.silu(x))


class _Nothing(nn.Module):
    """Has a weight, as most modules do, and saves nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def measure_overhead(device: torch.device) -> Overhead:
    """Run a chain of regions without a keeper, and under keepers that keep, recompute and move every second one."""
    chain, deep = _chain(device, 0), _chain(device, INSIDE)
    recompute = Rule("region*", "recompute", min_bytes=1)
    ways: list[tuple[nn.Module, Rule | None]] = [
        (chain, None),
        (chain, Rule("region0", "offload", min_bytes=1 << 40)),  # sees all that is saved, and moves nothing
        (chain, recompute),
        (chain, Rule("region*", "offload", min_bytes=1, prefetch_bytes=0)),
        (deep, None),
        (deep, recompute),
    ]
    turns = [[_launched(own, device, rule) for own, rule in ways] for _ in range(TURNS)]
    alone, kept, recomputed, moved, deep_alone, deep_recomputed = map(_fastest, zip(*turns))

    pack, unpack = _each(kept, alone, _Small.saves * len(chain))
    record, replay = _each(recomputed, kept, REGIONS)
    replay = max(0.0, replay - alone[0] / len(chain))
    put, get = _each(moved, kept, REGIONS)
    # What the modules themselves take is in both, and once more in a replay.
    modules = deep_alone[0] - alone[0], deep_alone[1] - alone[1]
    again = deep_alone[0] - alone[0]
    shallow = recomputed[0] + modules[0], recomputed[1] + modules[1] + again * REGIONS / len(chain)
    record_module, replay_module = _each(deep_recomputed, shallow, REGIONS * INSIDE)
    return Overhead(pack, unpack, record, replay, put, get, record_module, replay_module)


def in_model(cost: Overhead, step: RepeatedStep, regions: Sequence[Region], tensors: int) -> Overhead:
    """The costs between the launches of a model whose step saves so many tensors."""
    # (Not of modules that recompute by themselves: a keeper opens no region for one, so there is nothing to time.)
    own = {name for name, module in step.model.named_modules() if hasattr(module, "use_recompute")}
    rule, count = _small_regions([region for region in regions if region.name not in own])
    expected = tensors * cost.pack + count * cost.record
    if not count or not expected:
        return cost
    try:
        turns = [(_forward(step, None), _forward(step, rule)) for _ in range(TURNS)]
    except (RuntimeError, ValueError):  # a keeper refuses the model
        return cost
    alone, recorded = map(min, zip(*turns))
    slower = max(1.0, (recorded - alone) / expected)
    return replace(cost.scaled(slower), put=cost.put, get=cost.get)


def _chain(device: torch.device, inside: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            (f"{kind}{at}", _Small(device, inside)) for at in range(REGIONS) for kind in ("other", "region")
        )
    )


def _fastest(turns: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of forward and of backward."""
    forward, backward = zip(*turns)
    return min(forward), min(backward)


def _each(seconds: tuple[float, float], others: tuple[float, float], count: int) -> tuple[float, float]:
    """What forward and backward take more than others, for one of so many."""
    forward, backward = (max(0.0, (one - other) / count) for one, other in zip(seconds, others))
    return forward, backward


def _launched(chain: nn.Module, device: torch.device, rule: Rule | None) -> tuple[float, float]:
    """The host's seconds of forward and backward, under a keeper with one rule or without: the medians."""
    x = torch.zeros(WIDTH, WIDTH, device=device, requires_grad=True)
    keeper = None if rule is None else Keeper(Policy([rule]), quiet=True).attach(chain)
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


def _forward(step: RepeatedStep, rule: Rule | None) -> float:
    """The host's seconds to launch the model's forward, under a keeper with one rule or without: the median."""
    keeper = None if rule is None else Keeper(Policy([rule]), quiet=True).attach(step.model)
    try:
        times = [
            step.launch_forward(nullcontext() if keeper is None else keeper.step())
            for _ in range(WARM + ROUNDS)
        ]
    finally:
        if keeper is not None:
            keeper.detach()
    return statistics.median(times[WARM:])


def _small_regions(regions: Sequence[Region]) -> tuple[Rule | None, int]:
    """A rule that recomputes modules that are alike, as many as there are, and how many: the fastest ones."""
    around = {name for region in regions for name in region.path[:-1]}
    alike: dict[str, list[Region]] = {}
    for region in regions:
        can = "recompute" in region.homes and region.within == region.name
        if can and region.calls == 1 and region.bytes and region.name not in around:
            alike.setdefault(re.sub(r"\b\d+\b", "*", region.name, count=1), []).append(region)
    if not alike:
        return None, 0
    most = max(map(len, alike.values()))
    many = [pattern for pattern, found in alike.items() if len(found) == most]
    pattern = min(many, key=lambda name: sum(region.forward_seconds for region in alike[name]))
    return Rule(pattern, "recompute", min_bytes=1), most
