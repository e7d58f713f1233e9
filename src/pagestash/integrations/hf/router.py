"""Routers of any model decide once, also where the layer around them is recomputed.

A replay of a layer takes the first forward's logits, weights and ids (`ps.once`): tokens go to the experts that
they went to, whatever the kernels of a second forward would round to. What the router saved for backward stays.
"""

from typing import Any

from torch import nn

from pagestash.integrations.hf.report import Report, patched_already
from pagestash.saved.recompute.once import once


def route_once(modules: list[tuple[str, nn.Module]], report: Report) -> None:
    """Let each router among `modules`, with their names, run once."""
    for name, module in modules:
        if "Router" not in type(module).__name__:
            continue
        why = patched_already(module)
        if why is not None:
            report.leave("router", name, module, why)
            continue
        report.put_forward(module, _forward_once)
        report.replace("router", name, module, "its choice is made once, also where its layer is recomputed")


def _forward_once(self: Any, *args: Any, **options: Any) -> Any:
    """The class's `forward`, which is not replayed."""
    return once(lambda: type(self).forward(self, *args, **options))
