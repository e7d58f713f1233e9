"""Gradient scalers in a step that may be rerun: their host state, and a check that all of them are known."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.amp import GradScaler

from pagestash.torch_internals import ScalerState, scaler_state, set_scaler_state

_SET_BY_A_SCALER = ("grad_scale", "found_inf")


class Scalers:
    """The scalers of a step: their device state is protected like a buffer, their host state is saved here."""

    def __init__(self, scalers: Iterable[GradScaler], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._scalers = [scaler for scaler in scalers if scaler.is_enabled()]
        self._optimizers = optimizers
        self._before: list[tuple[GradScaler, ScalerState]] = []
        self._set: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []

    def tensors(self) -> list[torch.Tensor]:
        """The scales and growth trackers that exist already."""
        found = (each for scaler in self._scalers for each in scaler_state(scaler)[:2])
        return [tensor for tensor in found if tensor is not None]

    def remember(self) -> None:
        self._before = [(scaler, _host_state(scaler)) for scaler in self._scalers]
        self._set = [
            (optimizer, {name: vars(optimizer)[name] for name in _SET_BY_A_SCALER if name in vars(optimizer)})
            for optimizer in self._optimizers
        ]

    def put_back(self) -> None:
        """Restore the scalers, and the attributes that they set on optimizers."""
        for scaler, state in self._before:
            set_scaler_state(scaler, state)
        self._before = [(scaler, _host_state(scaler)) for scaler, _ in self._before]
        for optimizer, attributes in self._set:
            for name in _SET_BY_A_SCALER:
                vars(optimizer).pop(name, None)
            vars(optimizer).update(attributes)

    def check_caller(self) -> None:
        """Called from an optimizer's hook: raise if the caller is a scaler that was not found and not passed."""
        frame, depth = sys._getframe(1), 0
        while frame is not None and depth < 20:
            if frame.f_code.co_filename.endswith("grad_scaler.py"):
                scaler = frame.f_locals.get("self")
                known = any(scaler is each for each in self._scalers)
                if isinstance(scaler, GradScaler) and scaler.is_enabled() and not known:
                    raise ValueError(
                        "train_step uses a GradScaler that GraphedStep does not know, so an overflowing step could "
                        "not be undone in it; pass scaler=..."
                    )
            frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]


def _host_state(scaler: GradScaler) -> ScalerState:
    """A scaler's state, with copies of the dicts that it changes in place."""
    scale, tracker, states = scaler_state(scaler)
    copies = {
        optimizer: {key: dict(value) if isinstance(value, dict) else value for key, value in state.items()}
        for optimizer, state in states.items()
    }
    factory = states.default_factory if isinstance(states, defaultdict) else None
    return scale, tracker, defaultdict(factory, copies)
