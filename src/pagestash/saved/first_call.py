"""The first call of a model in a keeper's step: its arguments, so that it can be measured between steps."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pagestash.saved.module_hook import RunHook
from pagestash.saved.module_hooks import RegionHooks
from pagestash.saved.quiet_rules import StepNeverOpened
from pagestash.saved.recompute.trees import map_leaves, tensors_of
from pagestash.saved.weight_sums import WeightSums
from pagestash.torch_internals import current_transform

log = logging.getLogger("pagestash")

UNSEEN = 3
"""After so many steps without a call of the model, a warning says so."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a forward, and the dtype of the autocast that it ran under."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        if any(tensor.requires_grad for tensor in tensors_of((args, kwargs))):
            # What computed them is no part of the model, and its graph must not live on.
            args, kwargs = map_leaves(_leaf, (args, kwargs))
        kind = next((tensor.device.type for tensor in model.parameters()), "cpu")
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(args, kwargs, autocast)


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value


def has_gradients(model: nn.Module) -> bool:
    """Whether a parameter has one."""
    return any(parameter.grad is not None for parameter in model.parameters())


class FirstCall:
    """Watches a model until a step has called it: `call` is set then, and `over` when that step is."""

    def __init__(self, model: nn.Module, declared: Sequence[str], regions: RegionHooks) -> None:
        self.model = model
        self.declared = declared
        """The regions that the caller has declared."""
        self.call: Call | None = None
        self.over = False
        self.overlaps = False
        """Whether another forward began before the backward of the one before."""
        self.gradients_held = False
        """Whether a forward of the step found gradients in place."""
        self.written: list[nn.Parameter] = []
        """The weights that the first forward has written to."""
        self._weights: WeightSums | None = None
        self._regions = regions
        self._in_step = False
        self._waiting = 0
        """Forwards whose backward has not begun."""
        self._unseen = 0
        self._outside = StepNeverOpened()
        self._hooks = [
            model.register_forward_pre_hook(RunHook(self._before), with_kwargs=True),
            model.register_forward_hook(RunHook(self._after)),
        ]

    def remove(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step is open inside. One that ends by an exception has shown nothing."""
        before, self._in_step = self._in_step, True
        try:
            yield
        except BaseException:
            self.call, self.overlaps, self.gradients_held, self._waiting = None, False, False, 0
            raise
        finally:
            self._in_step = before
        self.over = self.call is not None
        self._unseen += not self.over
        if self._unseen == UNSEEN:
            log.warning(
                "a keeper with a budget has seen no call of its model in %d steps, so it cannot plan: call the "
                "attached model itself, model(...), outside of functions that torch.compile compiles",
                UNSEEN,
            )

    def _counts(self) -> bool:
        return (
            self._in_step
            and not self._regions.aside
            and torch.is_grad_enabled()
            and current_transform() is None
        )

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._counts():
            return
        self.overlaps |= self._waiting > 0
        self.gradients_held |= has_gradients(self.model)
        if self.call is None:
            self.call = Call.of(self.model, args, kwargs)
            self._weights = WeightSums(self.model.parameters())

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._in_step:
            if torch.is_grad_enabled():
                self._outside.saw(output)
            return
        if not self._counts():
            return
        if self._weights is not None:
            self.written, self._weights = self._weights.written(), None
        outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        if outputs:
            self._waiting += 1
            backward = _BackwardBegins(self)
            for tensor in outputs:
                tensor.register_hook(backward)

    def backward_begins(self) -> None:
        self._waiting -= 1


class _BackwardBegins:
    """On every output of one forward: backward has come to the first of them."""

    def __init__(self, first: FirstCall) -> None:
        self._first: FirstCall | None = first

    def __call__(self, gradient: torch.Tensor) -> None:
        if self._first is not None:
            self._first.backward_begins()
            self._first = None
