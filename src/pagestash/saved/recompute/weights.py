"""The weights of a forward: a replay has the same tensors with the same bytes, or is refused by name."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pagestash.saved.recompute.references import is_sharded
from pagestash.saved.recompute.undo import Undo, enter
from pagestash.saved.recompute.value_checks import Checks
from pagestash.saved.storage import PLAIN_TENSORS, checksum, storage_keys
from pagestash.saved.streams import capturing
from pagestash.torch_internals import (
    LOCAL_PART,
    key_of_storage,
    parameters_of,
    preserve_versions,
    storage_key,
)

VersionOnly = WeakKeyDictionary[nn.Module, set[str]]
"""Names of weights whose version a forward raises while their bytes stay, as a parametrization's `set_` does."""


class _Weight(NamedTuple):
    owner: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    memory: tuple[torch.UntypedStorage, int, int] | None
    """Its storage, address and offset; None for a subclass (DTensor). The storage is held, so that no other storage
    gets its address."""

    def there(self) -> torch.Tensor | None:
        """The weight that the module has now."""
        return parameters_of(self.owner).get(self.name)

    def moved(self) -> bool:
        """Whether it has other memory, or none. (FSDP2 frees a storage and allocates it again, elsewhere.)"""
        if self.memory is None or self.tensor.data_ptr() == self.memory[1]:
            return False
        storage, _, offset = self.memory
        same = storage_key(self.tensor) == key_of_storage(storage)
        return not same or self.tensor.storage_offset() != offset or not storage.nbytes()


_weight: Callable[[tuple[Any, ...]], _Weight] = partial(tuple.__new__, _Weight)
"""Makes one of its fields. (There may be a hundred in a region, and this takes a third of the time.)"""


class Weights:
    """Noted before a region's first forward."""

    def __init__(
        self, modules: Sequence[nn.Module], region: str, version_only: VersionOnly, checks: Checks
    ) -> None:
        self._region = region
        self._root = modules[0]
        self._version_only = version_only
        self._checks = checks
        self._checksums: dict[int, torch.Tensor] = {}
        """Of weights whose version forward raised, until it is known whether it changed their bytes."""
        self._weights: list[_Weight] = []
        self.storages: set[int] = set()
        """The storages that the weights live in."""
        others: list[torch.Tensor] = []
        for owner in modules:
            for name, weight in parameters_of(owner).items():
                if weight is not None:
                    memory = None
                    if type(weight) in PLAIN_TENSORS and weight.layout is torch.strided:
                        storage = weight.untyped_storage()
                        memory = (storage, weight.data_ptr(), weight.storage_offset())
                        self.storages.add(key_of_storage(storage))
                    else:
                        others.append(weight)
                    self._weights.append(_weight((owner, name, weight, weight._version, memory)))
        if others:
            self.storages |= storage_keys(others)
        self._before: dict[int, torch.Tensor] = {}
        """Checksums before forward, of weights whose versions alone it changed so far."""
        if version_only and not capturing():
            for number, noted in enumerate(self._weights):
                if self._is_version_only(noted) and (found := checksum(noted.tensor)) is not None:
                    self._before[number] = found

    def close(self) -> None:
        """Forward is over: where it raised a version, backward must find the raised one."""
        for number, weight in enumerate(self._weights):
            version = weight.tensor._version
            if version != weight.version:
                self._weights[number] = weight._replace(version=version)
                if not self._is_version_only(weight) and not capturing():
                    found = checksum(weight.tensor)
                    if found is not None:
                        self._checksums[number] = found
        self._expect_unchanged("changed in its forward")

    def check(self) -> None:
        """Refuse a replay if the weights have other bytes than in forward."""
        self._expect_unchanged("changed in place between forward and backward")
        for number, weight in enumerate(self._weights):
            if weight.tensor._version != weight.version and not self._same_bytes(number):
                raise self._refusal(weight, "was changed in place")
            if weight.moved():
                there = weight.there()
                if there is weight.tensor or not is_sharded(weight.tensor, there):
                    raise self._refusal(weight, "was given other memory (.data) in forward, or")

    def sharded(self) -> bool:
        """Whether a weight that was whole in forward is in shards now."""
        return any(
            hasattr(there, LOCAL_PART) and not hasattr(weight.tensor, LOCAL_PART)
            for weight in self._weights
            if (there := weight.there()) is not weight.tensor
        )

    def restore(self, undo: Undo) -> None:
        """From here on, no version is raised of weights whose versions alone forward changes."""
        if self._checksums or self._version_only:
            alone = [
                weight.tensor
                for number, weight in enumerate(self._weights)
                if number in self._checksums or self._is_version_only(weight)
            ]
            if alone:
                enter(preserve_versions(tuple(alone)), undo)

    def check_after(self) -> None:
        """A replay is over: refuse if it has changed a weight, as the first forward then did, too."""
        for number in list(self._checksums):
            if not self._same_bytes(number):
                raise RuntimeError(
                    f"region {self._region!r} is under recompute, and its forward changes its weight "
                    f"{self._name(self._weights[number])!r} in place, so that it cannot be replayed; change it "
                    "outside forward, or give the region another home"
                )

    def _expect_unchanged(self, how: str) -> None:
        """Of weights whose versions tell nothing: the answer is read when the step is over."""
        for number, before in self._before.items():
            weight = self._weights[number]
            now = checksum(weight.tensor)
            if now is not None:
                self._checks.at_end(
                    now != before,
                    f"region {self._region!r} is under recompute, and its weight {self._name(weight)!r} was {how}, "
                    "so that this step's gradients are wrong; change it after backward, or give the region another "
                    "home",
                )

    def _is_version_only(self, weight: _Weight) -> bool:
        return bool(self._version_only) and weight.name in self._version_only.get(weight.owner, ())

    def _same_bytes(self, number: int) -> bool:
        """Whether a weight whose version was raised has the same bytes. Waits for the device, the first time."""
        weight = self._weights[number]
        before = self._checksums.get(number)
        if before is not None and not capturing():
            found = checksum(weight.tensor)
            if found is None or not torch.equal(before, found):
                return False
            del self._checksums[number]
            self._version_only.setdefault(weight.owner, set()).add(weight.name)
        return self._is_version_only(weight)

    def _name(self, weight: _Weight) -> str:
        inside = (name for name, module in self._root.named_modules() if module is weight.owner)
        return f"{next(inside, '')}.{weight.name}".lstrip(".")

    def _refusal(self, weight: _Weight, how: str) -> RuntimeError:
        return RuntimeError(
            f"region {self._region!r} is under recompute, and its weight {self._name(weight)!r} {how} between "
            "forward and backward, so that its tensors cannot be recomputed; change it after backward, or give the "
            "region another home"
        )
