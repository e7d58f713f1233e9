"""Autocast and attention kernels: modes that a forward ran under, and a replay runs under, too."""

from functools import cache, partial

import torch

from pagestash.saved.recompute.undo import Undo, enter
from pagestash.torch_internals import any_autocast


class Modes:
    """The modes now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._autocast = _autocast(device)
        self._attention = _attention_kernels()

    def restore(self, undo: Undo) -> None:
        """They hold from here on."""
        now = _autocast(self._device)
        if now != self._autocast:
            for kind in {*now, *self._autocast}:
                dtype, cached = self._autocast.get(kind) or now[kind]
                enabled = kind in self._autocast
                enter(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cached), undo)
        attention = _attention_kernels()
        if attention != self._attention:
            _set_attention_kernels(self._attention)
            undo.append(partial(_set_attention_kernels, attention))


def _autocast(device: torch.device) -> dict[str, tuple[torch.dtype, bool]]:
    """The kinds of device for which it is on, with its dtype, and whether it keeps what it has cast."""
    if not any_autocast():
        return {}
    return {
        kind: (torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in _kinds(device)
        if torch.is_autocast_enabled(kind)
    }


@cache
def _kinds(device: torch.device) -> tuple[str, ...]:
    """The kinds of device whose autocast matters on `device`."""
    return ("cpu",) if device.type == "cpu" else (device.type, "cpu")


def _attention_kernels() -> tuple[bool, ...]:
    """The kernels that `sdpa_kernel` allows `scaled_dot_product_attention`: each saves other tensors."""
    of = torch.backends.cuda
    return (
        of.flash_sdp_enabled(),
        of.mem_efficient_sdp_enabled(),
        of.math_sdp_enabled(),
        of.cudnn_sdp_enabled(),
    )


def _set_attention_kernels(enabled: tuple[bool, ...]) -> None:
    flash, efficient, math, cudnn = enabled
    on = torch.backends.cuda
    on.enable_flash_sdp(flash)
    on.enable_mem_efficient_sdp(efficient)
    on.enable_math_sdp(math)
    on.enable_cudnn_sdp(cudnn)
