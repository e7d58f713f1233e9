"""Everything of torch that has no public name, in one place.

A torch release may rename any of it. Then this module raises `TorchInternalMissing`, which names what is gone. A
release that is newer than `CHECKED` and has all of it goes on working.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Literal

import torch

CHECKED = ("2.11", "2.13")
"""Versions of torch that all tests were run on."""


class TorchInternalMissing(ImportError):
    """This torch lacks a private function or attribute that pagestash needs."""


def internal(owner: Any, path: str) -> Any:
    """`owner.path` of torch; the path may have several parts."""
    found = owner
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            name = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", type(owner).__name__)
            raise TorchInternalMissing(
                f"pagestash uses torch's {name}.{path}, which torch {torch.__version__} does not have; "
                f"versions checked: {', '.join(CHECKED)}"
            ) from None
    return found


# --- torch.distributed.pipelining: loaded on first use, which takes a second ---


def pipeline_schedules() -> Any:
    """The module of torch's schedules."""
    return import_module("torch.distributed.pipelining.schedules")


def stages_of(schedule: Any) -> Sequence[Any]:
    """The stages of this rank, as a schedule of one stage or of several has them."""
    return getattr(schedule, "_stages", None) or [internal(schedule, "_stage")]


def microbatches_of(schedule: Any) -> int:
    """How many microbatches a step of the schedule has."""
    return internal(schedule, "_n_microbatches")


def has_backward(schedule: Any) -> bool:
    """Whether the schedule has a loss, and so runs backward."""
    return internal(schedule, "_has_backward")


def replaced_actions(schedule: Any) -> list[str]:
    """The kinds of action that `register_custom_function` has replaced."""
    return sorted(str(kind) for kind in getattr(schedule, "_comp_type_to_function_map", {}))


def runs_as(schedule: Any) -> Literal["1F1B", "GPipe", "list", "unknown"]:
    """By whose code a schedule runs its microbatches: one of two that stand in code, or from a list."""
    runs = getattr(type(schedule), "_step_microbatches", None)
    known = pipeline_schedules()
    if runs is internal(known, "Schedule1F1B._step_microbatches"):
        return "1F1B"
    if runs is internal(known, "ScheduleGPipe._step_microbatches"):
        return "GPipe"
    if runs is internal(known, "_PipelineScheduleRuntime._step_microbatches") and hasattr(
        schedule, "pipeline_order_with_comms"
    ):
        return "list"
    return "unknown"


def without_communication(schedule: type) -> Callable[..., Any]:
    """The schedule class, but for its sends and receives: they take long to place, and change no rank's order."""
    internal(schedule, "_prepare_schedule_with_comms")

    class Unprepared(schedule):
        def _prepare_schedule_with_comms(self, actions: Any, format: Any = "compute_only") -> None:
            pass

    Unprepared.__name__ = schedule.__name__
    return Unprepared
