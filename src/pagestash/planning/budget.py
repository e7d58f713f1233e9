"""How many bytes a step may take, and what the device holds beside it."""

import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch

from pagestash.device import memory_of_process
from pagestash.planning.prediction import Prediction
from pagestash.policy import HOMES
from pagestash.profiling.profiled import ProfiledStep
from pagestash.sizes import format_bytes, host_share, parse_bytes
from pagestash.torch_internals import LOCAL_PART

SPARE = 0.03
"""Part of the device that `"auto"` leaves free: the allocator cannot use every byte."""

EXPECTED = "a part from 0 to 1 like 0.5 or '50%' (1.0 is all), bytes like '40GiB', or 'auto'"
LEAST = 1 << 20
"""Bytes of a budget; fewer are a number whose unit was forgotten."""

HELD_BY = {
    "base": "weights, optimizer and held gradients",
    "other": "workspace and new gradients",
    "keep": "kept tensors",
    "stash": "the pool",
    "offload": "the offload window",
    "recompute": "recomputed tensors",
}
"""What a part of `Prediction.memory` is."""


def parse_budget(budget: str | float, unplanned: Prediction, device: str) -> int:
    """Bytes that the device may hold at a step's peak, weights included.

    `"40GiB"`, an int or `80e9`: bytes. A float up to 1, or `"50%"`: that part of the saved bytes at the unplanned
    peak, and all else that is there then. `"auto"`: what this process can have of its GPU.
    """
    check_budget(budget)
    if budget == "auto":
        return device_budget(device)
    part = _part(budget)
    if part is None:
        return parse_bytes(budget, "budget", EXPECTED)  # type: ignore[arg-type]
    saved = sum(unplanned.at_peak()[home] for home in HOMES)
    return unplanned.peak_bytes - int((1 - part) * saved)


def check_budget(budget: str | float, device: str | None = None) -> None:
    """Refuse what is no budget for any step; `device`: where it runs, if known, which may have no `"auto"`."""
    if budget == "auto":
        if device is not None:
            device_budget(device)
    elif _part(budget) is None and parse_bytes(budget, "budget", EXPECTED) < LEAST:  # type: ignore[arg-type]
        raise ValueError(f"budget={budget!r} is in bytes, and a step takes more; expected {EXPECTED}")


def check_step(loss: object, optimizer: object) -> None:
    """Refuse what is no loss function and no optimizer."""
    if loss is not None and not callable(loss):
        raise ValueError(f"loss={loss!r}: expected a function of the model's output, which returns a scalar")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"optimizer={optimizer!r}: expected the optimizer that trains the model's parameters"
        )


def _part(budget: Any) -> float | None:
    """The budget as a part of the saved bytes; None if it is something else."""
    value = budget
    if isinstance(budget, str):
        percent = budget.strip().endswith("%")
        try:
            value = float(budget.strip(" %")) if percent or "." in budget else None
        except ValueError:
            return None
        if percent and value is not None:
            value /= 100
    if not isinstance(value, float) or not math.isfinite(value) or not 0 < value <= 1:
        return None
    return value


def device_budget(device: str) -> int:
    """What this process can have of its GPU, less a reserve."""
    if not device.startswith("cuda"):
        raise ValueError(
            f"budget='auto': {device} has no memory of its own; expected bytes, like '40GiB', or a part"
        )
    if not torch.cuda.is_available():
        raise ValueError("budget='auto': the GPU of the profile is not here; expected bytes, like '40GiB'")
    return int((1 - SPARE) * memory_of_process(device))


def parse_host(host: str | int) -> int:
    """Bytes of pinned memory that offload may take; `"auto"` is this rank's share, as in a policy."""
    return host_share() if host == "auto" else parse_bytes(host, "host")


def base_bytes(profile: ProfiledStep, optimizer_bytes: int) -> int:
    """What the device holds before the step: weights, held gradients, optimizer state, and what is not ours."""
    held = profile.gradient_bytes if profile.gradients == "held" else 0
    return profile.model_bytes + held + (profile.other_bytes or 0) + optimizer_bytes


def rank_bytes(stages: Iterable[ProfiledStep], optimizer_bytes: int) -> int:
    """What a pipeline rank's device holds before the step; its microbatches add to gradients that are there."""
    known = list(stages)
    own = sum(stage.model_bytes + stage.gradient_bytes for stage in known)
    return own + max(stage.other_bytes or 0 for stage in known) + optimizer_bytes


def optimizer_state(optimizer: torch.optim.Optimizer, *, to_come: bool = False) -> int:
    """Bytes of the optimizer's state on this rank, also before its first step; `to_come`: without what is
    allocated already.

    A parameter without a state yet gets what one step of the same optimizer gives a small one, scaled to its size.
    """
    known = 0 if to_come else sum(_state_bytes(state) for state in optimizer.state.values())
    for group in optimizer.param_groups:
        fresh = [p for p in group["params"] if p not in optimizer.state and p.requires_grad]
        per_element: dict[torch.dtype, float] = {}
        for parameter in fresh:
            if parameter.dtype not in per_element:
                per_element[parameter.dtype] = _probe(optimizer, group, parameter)
            known += int(per_element[parameter.dtype] * getattr(parameter, LOCAL_PART, parameter).numel())
    return known


def _probe(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> float:
    """State bytes of one element: of a small parameter after one step."""
    small = torch.nn.Parameter(torch.zeros(64, 64, dtype=parameter.dtype, device=parameter.device))
    small.grad = torch.zeros_like(small)
    taken = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in group.items() if key in taken and key != "params"}
    try:
        trial = type(optimizer)([small], **options)
        trial.step()
    except Exception as error:
        raise ValueError(
            f"optimizer: the state of {type(optimizer).__name__} is not known before its first step ({error}); "
            "run one step before the plan"
        ) from error
    return _state_bytes(trial.state[small]) / small.numel()


def _state_bytes(state: dict[str, Any]) -> int:
    parts = (getattr(value, LOCAL_PART, value) for value in state.values())
    # A step count of one element is not worth a byte of a parameter.
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor) and part.numel() > 1)


def notes_on(profile: ProfiledStep, *, loops: bool = False) -> list[str]:
    """What a profile of a compiled model does not say, and what slows its loop down."""
    found = []
    if any(segment.peak_bytes is None for segment in profile.segments):
        found.append("workspace and gradients are not in this profile: the peak is that of saved tensors")
    if loops and profile.host_waits:
        found.append(
            "the step makes the host wait for the device, so that no step is launched ahead; "
            'torch.cuda.set_sync_debug_mode("warn") says where'
        )
    return found


def describe(prediction: Prediction) -> str:
    """What holds the memory at a prediction's peak, largest first."""
    sizes = sorted(prediction.at_peak().items(), key=lambda item: -item[1])
    return ", ".join(f"{HELD_BY[name]} {format_bytes(size)}" for name, size in sizes if size)
