"""RNG states, buffers, autocast and attention kernels: what a forward reads and a replay must find as it was."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pagestash.saved.recompute.rng import (
    PythonRng,
    PythonRngStates,
    TorchRng,
    own_generator,
    python_rng_state,
    set_python_rng_state,
    set_torch_rng_state,
    torch_rng_drawn,
    torch_rng_state,
)
from pagestash.saved.recompute.value_checks import Checks
from pagestash.saved.storage import checksum, plain_storage
from pagestash.saved.streams import capturing
from pagestash.torch_internals import buffers_of, key_of_storage, storage_key

SMALL_BUFFER = 65536
"""Buffers up to this many bytes are copied before every forward: the copy is cheap, and versions do not tell all
(`F.batch_norm` writes its statistics without raising a version)."""

_NOTHING = nullcontext()
ChangesBuffers = WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]]
"""For each large buffer of a module that was seen, in training and not: whether a forward ever changed it."""


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


@cache
def _kinds(device: torch.device) -> tuple[str, ...]:
    """The kinds of device whose autocast matters on `device`."""
    return ("cpu",) if device.type == "cpu" else (device.type, "cpu")


def _autocast(kind: str) -> tuple[str, bool, torch.dtype, bool]:
    return (
        kind,
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )


def _version(buffer: torch.Tensor) -> int:
    """(An inference tensor has none: outside inference mode nothing changes it.)"""
    return 0 if buffer.is_inference() else buffer._version


@dataclass(slots=True, eq=False)
class _Buffer:
    """A buffer before forward, and a copy of its bytes where forward may change them."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    storage: torch.UntypedStorage  # held, so that no other storage gets its key
    copy: torch.Tensor | None
    checksum: torch.Tensor | None
    """Of its bytes, where there is no copy."""
    training: bool
    """Whether its module was in training before forward."""

    @property
    def small(self) -> bool:
        return self.tensor.nbytes <= SMALL_BUFFER

    def changed(self) -> bool:
        """Whether it has other bytes, as far as its version tells, or other memory."""
        return _version(self.tensor) != self.version or storage_key(self.tensor) != key_of_storage(
            self.storage
        )

    def same_content(self) -> bool:
        """Waits for the device. A capture must not wait, and takes the buffer for changed."""
        capturing = self.tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        return self.copy is None or (not capturing and torch.equal(self.tensor, self.copy))


class RngAndBuffers:
    """Noted before a region's first forward; `restored` for each replay."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        region: str,
        device: torch.device,
        changes: ChangesBuffers,
        python: PythonRngStates,
        checks: Checks,
        *,
        search: bool,
    ) -> None:
        """Of the region's module, the first of `modules`, and those inside.

        `search`: look for generators of its own.
        """
        self._searched = modules if search else ()
        self._module = modules[0]
        self._region = region
        self._device = device
        self._changes = changes
        self._python = python
        self._checks = checks
        self._buffers = [
            self._before(owner, name, buffer)
            for owner in modules
            for name, buffer in buffers_of(owner).items()
            if buffer is not None
        ]
        self._found = [(owner, dict(buffers_of(owner))) for owner in modules]
        self._made: list[tuple[nn.Module, str, bool]] = []
        """Buffers that forward has registered, or found to be None and gave a tensor; and whether the former."""
        self._autocast = [_autocast(kind) for kind in _kinds(device)]
        self._attention = _attention_kernels()
        self._torch_rng: TorchRng | None = torch_rng_state(device)
        self._python_rng: PythonRng | None = python.now()

    def _before(self, owner: nn.Module, name: str, buffer: torch.Tensor) -> _Buffer:
        if is_lazy(buffer):
            raise RuntimeError(
                f"region {self._region!r} is under recompute, and its buffer {name!r} gets its shape in the first "
                "forward; run one forward before the keeper is attached, or give the region another home"
            )
        # A large buffer that is seen for the first time may be one that forward changes.
        may_change = buffer.nbytes <= SMALL_BUFFER or self._changes.get(owner, {}).get(
            (name, owner.training), True
        )
        copy = found = None
        if may_change:
            copy = buffer.detach().clone()
        elif plain_storage(buffer) is not None and not capturing():
            found = checksum(buffer)
        return _Buffer(
            owner, name, buffer, _version(buffer), buffer.untyped_storage(), copy, found, owner.training
        )

    def close(self) -> None:
        """Forward is over: learn which large buffers it changes, and let go of the copies of the others.

        A write through `.data` raises no version. So the bytes of a large buffer without a copy are compared, and
        the answer is read when the step is over.
        """
        for module in self._searched:
            name = own_generator(module)
            if name is not None:
                raise RuntimeError(
                    f"region {self._region!r} is under recompute, and {type(module).__name__} has a generator in "
                    f"its attribute {name!r}, from which a replay would draw other numbers; draw from the global "
                    "generator of torch, Python or NumPy, or give the region another home"
                )
        if self._torch_rng is not None and not torch_rng_drawn(self._device, self._torch_rng):
            self._torch_rng = None
        if self._python.now() is self._python_rng:
            self._python_rng = None
        for owner, names in self._found:
            for name, value in buffers_of(owner).items():
                if value is not None and names.get(name) is None:
                    self._made.append((owner, name, name not in names))
        self._found = []
        lost = None
        if self._buffers:
            lost = [buffer.name for buffer in self._buffers if not buffer.small and not self._learn(buffer)]
        if lost:
            raise RuntimeError(
                f"region {self._region!r} is under recompute, and its forward changed the buffer {lost[0]!r} for "
                "the first time since it was attached, so that its value before is lost; run the step again (the "
                "buffer is watched from now on), or give the region another home"
            )
        for buffer in self._buffers:
            before = buffer.checksum
            if before is not None:
                now = checksum(buffer.tensor)
                assert now is not None
                self._checks.at_end(
                    now != before,
                    f"region {self._region!r} is under recompute, and its forward changed the buffer "
                    f"{buffer.name!r} without raising its version, as a write through .data does, so that this "
                    "step's gradients are wrong; write to the buffer itself under torch.no_grad(), or give the "
                    "region another home",
                )

    def _learn(self, buffer: _Buffer) -> bool:
        """Whether the value before forward is still there, if forward has changed it."""
        seen = self._changes.setdefault(buffer.owner, {})
        key = buffer.name, buffer.training
        replaced = buffers_of(buffer.owner).get(buffer.name) is not buffer.tensor
        changed = _version(buffer.tensor) != buffer.version
        if key not in seen:
            changed = changed or not buffer.same_content()
        seen[key] = seen.get(key, False) or changed
        if not seen[key]:
            buffer.copy = buffer.tensor if replaced else None
        return buffer.copy is not None or not changed

    def check(self) -> None:
        """Refuse a replay if a buffer that has no copy was changed since forward."""
        for buffer in self._buffers:
            if buffer.copy is None and buffer.changed():
                raise RuntimeError(
                    f"region {self._region!r} is under recompute, and its buffer {buffer.name!r} was changed in "
                    "place between forward and backward, so that its tensors cannot be recomputed; change it after "
                    "backward, or give the region another home"
                )

    def restored(self) -> AbstractContextManager[None]:
        """As it was before the first forward; what the replay changes is undone."""
        nothing = not (self._buffers or self._made) and self._torch_rng is None and self._python_rng is None
        return _NOTHING if nothing and self._same_modes() else self._restored()

    def _same_modes(self) -> bool:
        """Whether autocast is off then and now, and attention may use the same kernels."""
        for before in self._autocast:
            if before[1] or _autocast(before[0]) != before:
                return False
        return self._attention == _attention_kernels()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            self._restore_modes(stack)
            noted = [(buffer.owner, buffer.name) for buffer in self._buffers]
            noted += [(owner, name) for owner, name, _ in self._made]
            buffers_now = [(owner, name, buffers_of(owner).get(name)) for owner, name in noted]
            torch_rng_now = None if self._torch_rng is None else torch_rng_state(self._device)
            python_rng_now = None if self._python_rng is None else python_rng_state()
            try:
                if self._torch_rng is not None:
                    set_torch_rng_state(self._device, self._torch_rng)
                if self._python_rng is not None:
                    set_python_rng_state(self._python_rng)
                for buffer in self._buffers:
                    # (Another may be there by now, such as one that `functional_call` put there.)
                    tensor = buffer.tensor if buffer.copy is None else buffer.copy.clone()
                    buffers_of(buffer.owner)[buffer.name] = tensor
                for owner, name, registered in self._made:
                    if registered:
                        buffers_of(owner).pop(name, None)
                    else:
                        buffers_of(owner)[name] = None
                yield
            finally:
                for owner, name, value in buffers_now:
                    buffers_of(owner)[name] = value
                if torch_rng_now is not None:
                    set_torch_rng_state(self._device, torch_rng_now)
                if python_rng_now is not None:
                    set_python_rng_state(python_rng_now)

    def _restore_modes(self, stack: ExitStack) -> None:
        """Autocast and the kernels of attention, until the stack ends."""
        for before in self._autocast:
            kind, enabled, dtype, cached = before
            # Where it is off then and now there is nothing to set, and `torch.autocast` takes 10 µs.
            if enabled or _autocast(kind) != before:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=cached))
        attention = _attention_kernels()
        if attention != self._attention:
            _set_attention_kernels(self._attention)
            stack.callback(_set_attention_kernels, attention)
