"""Hooks on the modules that a rule names: a region is open while one of them runs forward."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from pagestash.policy import Rule
from pagestash.saved.capture import Capture
from pagestash.saved.identity import modules_in, storage_keys, weight_keys
from pagestash.saved.recompute import Recompute
from pagestash.saved.region import Region, enter, frames, leave, running_again
from pagestash.saved.run import Run


class Watch:
    """Opens and closes the regions of one keeper's modules, while it is in a step."""

    def __init__(self, capture: Capture, recompute: Recompute) -> None:
        self.in_step = False
        self.aside = False
        """A forward that runs now is no part of the step."""
        self._capture = capture
        self._recompute = recompute
        self._hooks: list[Any] = []
        self._next_to_forward: list[tuple[Any, Any, Any]] = []
        self._noted: WeakSet[nn.Module] = WeakSet()

    def start(self) -> None:
        """A step begins."""
        self.in_step = True
        for module, opening, closing in self._next_to_forward:
            # What is run again is forward itself: no hook of another may stand between it and ours.
            module._forward_pre_hooks.move_to_end(opening.id)
            module._forward_hooks.move_to_end(closing.id, last=False)

    def remove(self) -> None:
        """Take all hooks off again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._next_to_forward.clear()
        self._noted.clear()

    def add(self, name: str, path: Sequence[nn.Module], rule: Rule) -> None:
        """Open a region around each forward of the last module of `path`, which the model's `name` leads along."""
        module = path[-1]
        open_regions: list[Region | None] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            current = frames()
            # No frames: another thread, such as autograd's when it runs a checkpointed forward again.
            if (
                not current
                or running_again()
                or not self.in_step
                or self.aside
                or not torch.is_grad_enabled()
            ):
                open_regions.append(None)
                return
            outer = current[-1]
            run = outer.run
            if rule.home != "recompute":
                run = None
            elif run is None:
                # (Inside another that is run again, a region's tensors are made with the other's.)
                # (A copy of an attached model has its hooks, too: what runs again is what ran.)
                way = path if module is path[-1] else [module]
                run = Run(self._recompute, self._capture, outer, way, name, rule, (args, kwargs))
            region = Region(
                self._capture,
                name,
                rule,
                rows=outer.rows,
                capacity=outer.capacity,
                weights=weight_keys(module),
                run=run,
            )
            open_regions.append(region)
            enter(region)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if open_regions:
                region = open_regions.pop()
                if region is not None and leave(region):
                    self._capture.close(region)
                    if isinstance(region.run, Run) and all(frame.run is not region.run for frame in frames()):
                        region.run.close(region.weights | self._capture.weights, output)

        def note_weights(module: nn.Module, args: Any) -> None:
            # FSDP2 gives a module new parameter storage just before its forward.
            current = frames()
            if self.in_step and current:
                current[-1].weights |= storage_keys(module._parameters.values())

        opening = module.register_forward_pre_hook(before, with_kwargs=True)
        # Also when forward raises: the region is over either way.
        closing = module.register_forward_hook(after, always_call=True)
        self._hooks += [opening, closing]
        if rule.home == "recompute":
            self._next_to_forward.append((module, opening, closing))
        for child in modules_in(module)[1:]:
            # Once, in however many regions it is: what it notes is for the innermost of them.
            if child not in self._noted and any(value is not None for value in child._parameters.values()):
                self._noted.add(child)
                self._hooks.append(child.register_forward_pre_hook(note_weights))
