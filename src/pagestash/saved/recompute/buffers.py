"""Buffers that a forward reads: a replay finds their values from before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pagestash.saved.recompute.value_checks import Checks
from pagestash.saved.storage import checksum, plain_storage
from pagestash.saved.streams import capturing
from pagestash.torch_internals import buffers_of, key_of_storage, storage_key

SMALL_BUFFER = 65536
"""Buffers up to this many bytes are copied before every forward: the copy is cheap, and versions do not tell all
(`F.batch_norm` writes its statistics without raising a version)."""

ChangesBuffers = WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]]
"""For each large buffer of a module that was seen, in training and not: whether a forward ever changed it."""


def version_of(buffer: torch.Tensor) -> int:
    """Of its bytes. (An inference tensor has none: outside inference mode nothing changes it.)"""
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

    def changed(self) -> bool:
        """Whether it has other bytes, as far as its version tells, or other memory."""
        return version_of(self.tensor) != self.version or storage_key(self.tensor) != key_of_storage(
            self.storage
        )

    def same_content(self) -> bool:
        """Waits for the device. A capture must not wait, and takes the buffer for changed."""
        return self.copy is None or (not capturing() and torch.equal(self.tensor, self.copy))


class Buffers:
    """Noted before a region's first forward. (Which tensors they are, `References` knows.)"""

    def __init__(
        self, modules: Sequence[nn.Module], region: str, changes: ChangesBuffers, checks: Checks
    ) -> None:
        self._region = region
        self._changes = changes
        self._checks = checks
        self._buffers = [
            self._before(owner, name, buffer)
            for owner in modules
            for name, buffer in buffers_of(owner).items()
            if buffer is not None
        ]

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
            owner, name, buffer, version_of(buffer), buffer.untyped_storage(), copy, found, owner.training
        )

    def close(self) -> None:
        """Forward is over: learn which large buffers it changes, and let go of the copies of the others.

        A write through `.data` raises no version. So the bytes of a large buffer without a copy are compared, and
        the answer is read when the step is over.
        """
        for buffer in self._buffers:
            if buffer.tensor.nbytes > SMALL_BUFFER and not self._learn(buffer):
                raise RuntimeError(
                    f"region {self._region!r} is under recompute, and its forward changed the buffer "
                    f"{buffer.name!r} for the first time since it was attached, so that its value before is lost; "
                    "run the step again (the buffer is watched from now on), or give the region another home"
                )
            if buffer.checksum is not None:
                now = checksum(buffer.tensor)
                assert now is not None
                self._checks.at_end(
                    now != buffer.checksum,
                    f"region {self._region!r} is under recompute, and its forward changed the buffer "
                    f"{buffer.name!r} without raising its version, as a write through .data does, so that this "
                    "step's gradients are wrong; write to the buffer itself under torch.no_grad(), or give the "
                    "region another home",
                )

    def _learn(self, buffer: _Buffer) -> bool:
        """Whether the value before forward is still there, if forward has changed it."""
        seen = self._changes.setdefault(buffer.owner, {})
        key = buffer.name, buffer.training
        changed = version_of(buffer.tensor) != buffer.version
        if key not in seen:
            changed = changed or not buffer.same_content()
        seen[key] = seen.get(key, False) or changed
        if not seen[key]:
            buffer.copy = None
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

    def put_copies(self) -> None:
        """In place of the buffers whose values forward may have changed. (Modules may share one.)"""
        copies: dict[int, torch.Tensor] = {}
        for buffer in self._buffers:
            if buffer.copy is not None:
                at = id(buffer.tensor)
                if at not in copies:
                    copies[at] = buffer.copy.clone()
                buffers_of(buffer.owner)[buffer.name] = copies[at]
