"""What a forward depends on besides its arguments: random state, autocast, buffers and weights."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

SMALL_BUFFER = 65536
"""Buffers up to this many bytes are copied before every forward: a copy costs less than to be surprised.
(Versions do not tell all: `F.batch_norm` writes its statistics without counting one.)"""

Random = tuple[torch.Tensor, torch.Tensor | None]
Known = WeakKeyDictionary[nn.Module, dict[str, bool]]
"""For each large buffer of a module that was seen: whether its forward ever changed it."""


def random_state(device: torch.device) -> Random:
    """The host's generator and, on a GPU, the device's. (In a capture this is the offset within the graph.)"""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def set_random_state(device: torch.device, state: Random) -> None:
    on_host, on_device = state
    torch.set_rng_state(on_host)
    if on_device is not None:
        torch.cuda.set_rng_state(on_device, device)


def drawn_since(device: torch.device, before: Random) -> bool:
    """Whether anything has drawn from a generator since its state was `before`."""
    now = random_state(device)
    return any(a is not None and b is not None and not torch.equal(a, b) for a, b in zip(before, now))


@dataclass(slots=True, eq=False)
class _Buffer:
    """A buffer before forward, and a copy of its bytes where forward may change them."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None

    @property
    def small(self) -> bool:
        return self.tensor.nbytes <= SMALL_BUFFER

    def same_content(self) -> bool:
        """Waits for the device; a capture must not, and takes it for changed."""
        capturing = self.tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        return self.copy is None or (not capturing and torch.equal(self.tensor, self.copy))


class Surroundings:
    """Taken before a module's first forward, closed after it; `restored` for each of its later ones."""

    def __init__(self, module: nn.Module, name: str, device: torch.device, known: Known) -> None:
        self.name = name
        self.device = device
        self._known = known
        self._weights = [
            (owner, short, weight, weight._version)
            for owner in module.modules()
            for short, weight in owner._parameters.items()
            if weight is not None
        ]
        self._buffers = [
            self._before(owner, short, buffer)
            for owner in module.modules()
            for short, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys((device.type, "cpu"))
        ]
        self._cached = torch.is_autocast_cache_enabled()
        self._random: Random | None = random_state(device)

    def _before(self, owner: nn.Module, short: str, buffer: torch.Tensor) -> _Buffer:
        # A large one that is seen for the first time may be one that forward changes.
        may_change = buffer.nbytes <= SMALL_BUFFER or self._known.get(owner, {}).get(short, True)
        return _Buffer(owner, short, buffer, buffer._version, buffer.detach().clone() if may_change else None)

    def close(self) -> None:
        """Forward is over: learn which large buffers it changes, and let go of the copies of the others."""
        if self._random is not None and not drawn_since(self.device, self._random):
            self._random = None
        lost = [buffer.name for buffer in self._buffers if not buffer.small and not self._learn(buffer)]
        if lost:
            raise RuntimeError(
                f"region {self.name!r} is under recompute, and its forward changed the buffer {lost[0]!r} for the "
                "first time since it was attached, so that its value before is lost; run the step again (the "
                "buffer is watched from now on), or give the region another home"
            )

    def _learn(self, buffer: _Buffer) -> bool:
        """Whether the value before forward can be had, if forward has changed it."""
        seen = self._known.setdefault(buffer.owner, {})
        replaced = buffer.owner._buffers.get(buffer.name) is not buffer.tensor
        changed = buffer.tensor._version != buffer.version
        if buffer.name not in seen:
            changed = changed or not buffer.same_content()
        seen[buffer.name] = seen.get(buffer.name, False) or changed
        if not seen[buffer.name]:
            buffer.copy = buffer.tensor if replaced else None
        return buffer.copy is not None or not changed

    def check(self) -> None:
        """Refuse to run again what would come out otherwise."""
        weights = (("weight", short, weight, version) for _, short, weight, version in self._weights)
        buffers = (
            ("buffer", each.name, each.tensor, each.version) for each in self._buffers if each.copy is None
        )
        for what, short, tensor, version in (*weights, *buffers):
            if tensor._version != version:
                raise RuntimeError(
                    f"region {self.name!r} is under recompute, and its {what} {short!r} was changed in place "
                    "between forward and backward, so that its tensors cannot be made again; change it after "
                    "backward, or give the region another home"
                )

    def sharded(self) -> bool:
        """Whether a weight that was whole in forward is in shards now."""
        return any(
            not hasattr(weight, "_local_tensor") and hasattr(owner._parameters.get(short), "_local_tensor")
            for owner, short, weight, _ in self._weights
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As it was before the first forward; what the new one changes is undone."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=self._cached))
            now: list[tuple[nn.Module, str, Any]] = [
                (buffer.owner, buffer.name, buffer.owner._buffers.get(buffer.name))
                for buffer in self._buffers
            ]
            ahead = None if self._random is None else random_state(self.device)
            try:
                if self._random is not None:
                    set_random_state(self.device, self._random)
                for buffer in self._buffers:
                    if buffer.copy is not None:
                        buffer.owner._buffers[buffer.name] = buffer.copy.clone()
                yield
            finally:
                for owner, short, value in now:
                    owner._buffers[short] = value
                if ahead is not None:
                    set_random_state(self.device, ahead)
