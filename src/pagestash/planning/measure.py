"""Measure a step to plan for: as it is, or while its layers are recomputed, where it finds no memory."""

import gc
from typing import Any, Literal

import torch
from torch import nn

from pagestash.planning.ranks import Ranks
from pagestash.profiling.layers import layers_of
from pagestash.profiling.measure import Way, profile
from pagestash.profiling.result import Profile
from pagestash.sizes import format_bytes

Measuring = Literal["auto", "whole", "recompute"]
"""How a step is measured; `auto`: as a whole, and if that finds no memory, while its layers are recomputed."""


def measured_step(
    model: nn.Module, batch: Any, ranks: Ranks, measure: Measuring, device: torch.device, **options: Any
) -> Profile:
    """The profile of a step.

    Of several ranks one may run out of memory while the others wait for it in a collective. So they recompute
    layers from the beginning.
    """
    layers = len(layers_of(model))
    ways: tuple[Way, ...] = ("whole", "recompute")
    if measure != "auto":
        ways = (measure,)
    elif ranks.count > 1 or not layers:
        ways = ("recompute",) if layers else ("whole",)
    for way in ways:
        found = ranks.together(lambda way=way: profile(model, batch, measure=way, **options))  # type: ignore[misc]
        if found is not None:
            return found
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    raise torch.OutOfMemoryError(_no_memory(device, layers if "recompute" in ways else 0))


def _no_memory(device: torch.device, layers: int) -> str:
    how = f"with all {layers} layers recomputed" if layers else "(it has no layers that could be recomputed)"
    taken = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        taken = (
            f"; {format_bytes(total - free)} of {format_bytes(total)} are taken before it begins, by weights, "
            "gradients, the optimizer's state and others"
        )
    return (
        f"a step finds no memory even {how}{taken}. A smaller batch, a head that is fused with its loss, an "
        "optimizer whose state is on the host, or more ranks would help"
    )
