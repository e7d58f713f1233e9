"""What a forward depends on besides its arguments: random state, autocast, buffers, weights and attributes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from pagestash.saved.attributes import Attributes, Names
from pagestash.saved.generators import Others, others_drawn_since, others_state, set_others_state
from pagestash.saved.storage import modules_in
from pagestash.saved.weights import Touched, Weights

SMALL_BUFFER = 65536
"""Buffers up to this many bytes are copied before every forward: a copy costs less than to be surprised.
(Versions do not tell all: `F.batch_norm` writes its statistics without counting one.)"""

Random = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(slots=True, eq=False)
class Known:
    """What was learned of the modules that were run."""

    buffers: WeakKeyDictionary[nn.Module, dict[str, bool]] = field(default_factory=WeakKeyDictionary)
    """For each large buffer of a module that was seen: whether its forward ever changed it."""
    touched: Touched = field(default_factory=WeakKeyDictionary)
    attributes: Names = field(default_factory=WeakKeyDictionary)
    draws: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """Modules whose forward was seen to draw from Python's or NumPy's generator."""


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


def _attention_kernels() -> tuple[bool, ...]:
    """The kernels that `sdpa_kernel` allows `scaled_dot_product_attention`: another saves other tensors."""
    on = torch.backends.cuda
    return (
        on.flash_sdp_enabled(),
        on.mem_efficient_sdp_enabled(),
        on.math_sdp_enabled(),
        on.cudnn_sdp_enabled(),
    )


def _set_attention_kernels(enabled: tuple[bool, ...]) -> None:
    flash, efficient, math, cudnn = enabled
    on = torch.backends.cuda
    on.enable_flash_sdp(flash)
    on.enable_mem_efficient_sdp(efficient)
    on.enable_math_sdp(math)
    on.enable_cudnn_sdp(cudnn)


@dataclass(slots=True, eq=False)
class _Buffer:
    """A buffer before forward, and a copy of its bytes where forward may change them."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    storage: torch.UntypedStorage  # held: no other gets its identity
    copy: torch.Tensor | None

    @property
    def small(self) -> bool:
        return self.tensor.nbytes <= SMALL_BUFFER

    def changed(self) -> bool:
        """Whether it has other bytes, or other memory, as far as torch tells."""
        return (
            self.tensor._version != self.version
            or self.tensor.untyped_storage()._cdata != self.storage._cdata
        )

    def same_content(self) -> bool:
        """Waits for the device; a capture must not, and takes it for changed."""
        capturing = self.tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        return self.copy is None or (not capturing and torch.equal(self.tensor, self.copy))


class Surroundings:
    """Taken before a module's first forward, closed after it; `restored` for each of its later ones."""

    def __init__(
        self, module: nn.Module, name: str, device: torch.device, known: Known, *, look: bool
    ) -> None:
        """`look`: whether to look for what this module was not seen to do so far."""
        self.name = name
        self.device = device
        self._module = module
        self._known = known
        modules = modules_in(module)
        self.weights = Weights(modules, name, known.touched)
        self._attributes = Attributes(modules, known.attributes, look)
        self._buffers = [
            self._before(owner, short, buffer)
            for owner in modules
            for short, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys((device.type, "cpu"))
        ]
        self._cached = torch.is_autocast_cache_enabled()
        self._attention = _attention_kernels()
        self._random: Random | None = random_state(device)
        self._others: Others | None = others_state() if look or module in known.draws else None

    def _before(self, owner: nn.Module, short: str, buffer: torch.Tensor) -> _Buffer:
        # A large one that is seen for the first time may be one that forward changes.
        may_change = buffer.nbytes <= SMALL_BUFFER or self._known.buffers.get(owner, {}).get(short, True)
        copy = buffer.detach().clone() if may_change else None
        return _Buffer(owner, short, buffer, buffer._version, buffer.untyped_storage(), copy)

    def storages(self) -> set[int]:
        """The storages of weights and buffers, as they were before forward."""
        return self.weights.storages() | {buffer.storage._cdata for buffer in self._buffers}

    def watches_others(self) -> bool:
        """Whether forward may draw from Python's or NumPy's generator, as far as is known."""
        return self._others is not None

    def close(self) -> None:
        """Forward is over: learn which large buffers it changes, and let go of the copies of the others."""
        if self._random is not None and not drawn_since(self.device, self._random):
            self._random = None
        if self._others is not None:
            if others_drawn_since(self._others):
                self._known.draws.add(self._module)
            else:
                self._others = None
        self.weights.close()
        lost = [buffer.name for buffer in self._buffers if not buffer.small and not self._learn(buffer)]
        if lost:
            raise RuntimeError(
                f"region {self.name!r} is under recompute, and its forward changed the buffer {lost[0]!r} for the "
                "first time since it was attached, so that its value before is lost; run the step again (the "
                "buffer is watched from now on), or give the region another home"
            )

    def _learn(self, buffer: _Buffer) -> bool:
        """Whether the value before forward can be had, if forward has changed it."""
        seen = self._known.buffers.setdefault(buffer.owner, {})
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
        self.weights.check()
        for buffer in self._buffers:
            if buffer.copy is None and buffer.changed():
                raise RuntimeError(
                    f"region {self.name!r} is under recompute, and its buffer {buffer.name!r} was changed in place "
                    "between forward and backward, so that its tensors cannot be made again; change it after "
                    "backward, or give the region another home"
                )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As it was before the first forward; what the new one changes is undone."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=self._cached))
            attention = _attention_kernels()
            if attention != self._attention:
                _set_attention_kernels(self._attention)
                stack.callback(_set_attention_kernels, attention)
            now: list[tuple[nn.Module, str, Any]] = [
                (buffer.owner, buffer.name, buffer.owner._buffers.get(buffer.name))
                for buffer in self._buffers
            ]
            ahead = None if self._random is None else random_state(self.device)
            others_ahead = None if self._others is None else others_state()
            stack.enter_context(self.weights.put_back())
            stack.enter_context(self._attributes.put_back())
            try:
                if self._random is not None:
                    set_random_state(self.device, self._random)
                if self._others is not None:
                    set_others_state(self._others)
                for buffer in self._buffers:
                    # (Another may stand there by now, as `functional_call` puts it.)
                    tensor = buffer.tensor if buffer.copy is None else buffer.copy.clone()
                    buffer.owner._buffers[buffer.name] = tensor
                yield
            finally:
                for owner, short, value in now:
                    owner._buffers[short] = value
                if ahead is not None:
                    set_random_state(self.device, ahead)
                if others_ahead is not None:
                    set_others_state(others_ahead)
