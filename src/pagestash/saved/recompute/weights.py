"""The weights of a forward: a replay has the same tensors with the same bytes, or is refused by name."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pagestash.saved.storage import PLAIN_TENSORS, checksum, storage_keys
from pagestash.saved.streams import capturing
from pagestash.torch_internals import (
    LOCAL_PART,
    key_of_storage,
    modules_in,
    parameters_of,
    preserve_versions,
    storage_key,
)

VersionOnly = WeakKeyDictionary[nn.Module, set[str]]
"""Names of weights whose version a forward raises while their bytes stay, as a parametrization's `set_` does."""

_ABSENT = object()
_NOTHING = nullcontext()


class _Weight(NamedTuple):
    owner: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    memory: tuple[torch.UntypedStorage, int, int] | None
    """Its storage, address and offset; None for a subclass (DTensor). The storage is held, so that no other storage
    gets its address."""

    def moved(self) -> bool:
        """Whether the tensor has other memory. (FSDP2 frees a storage and allocates it again, elsewhere.)"""
        if self.memory is None or self.tensor.data_ptr() == self.memory[1]:
            return False
        storage, _, offset = self.memory
        there = storage_key(self.tensor) == key_of_storage(storage)
        return not there or self.tensor.storage_offset() != offset

    def freed(self) -> bool:
        return self.memory is not None and self.memory[0].nbytes() == 0 and self.tensor.numel() > 0


_weight: Callable[[tuple[Any, ...]], _Weight] = partial(tuple.__new__, _Weight)
"""Makes one of its fields. (There may be a hundred in a region, and this takes a third of the time.)"""


class Weights:
    """Noted before a region's first forward; `restored` for each replay."""

    def __init__(self, modules: Sequence[nn.Module], region: str, version_only: VersionOnly) -> None:
        self._region = region
        self._modules = modules
        self._version_only = version_only
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

    def names_in(self, own: dict[str, Any]) -> set[str]:
        """Of the module that has these attributes."""
        return {weight.name for weight in self._weights if weight.owner.__dict__ is own}

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

    def check(self) -> Sequence[nn.Module]:
        """Refuse a replay with other weights than forward had. Returns the modules that there are now."""
        modules = self._check_modules()
        for number, weight in enumerate(self._weights):
            tensor = weight.tensor
            if tensor._version != weight.version and not self._same_bytes(number):
                raise self._refusal(weight, "was changed in place")
            is_there = parameters_of(weight.owner).get(weight.name) is tensor
            if is_there or not _is_sharded(weight):
                if weight.moved():
                    raise self._refusal(weight, "was given other memory (.data)")
                if not is_there and weight.freed():
                    raise self._refusal(weight, "was replaced and its memory freed")
                if not is_there and isinstance(getattr(type(weight.owner), weight.name, None), property):
                    raise self._refusal(weight, "was parametrized")
        return modules

    def _check_modules(self) -> Sequence[nn.Module]:
        now = modules_in(self._modules[0])
        if now == self._modules:
            return now
        there = set(now)
        gone = next((module for module in self._modules if module not in there), None)
        if gone is not None:
            raise RuntimeError(
                f"region {self._region!r} is under recompute, and a {type(gone).__name__} that was in it in "
                "forward is gone in backward, so that its tensors cannot be recomputed: it was replaced, or it is "
                "there only while the module around it runs, as a parametrization of PEFT's target_parameters is. "
                "Give the rule to the module around it, or the region another home"
            )
        return now

    def sharded(self) -> bool:
        """Whether a weight that was whole in forward is in shards now."""
        for weight in self._weights:
            if parameters_of(weight.owner).get(weight.name) is not weight.tensor and (
                _is_sharded(weight) and not hasattr(weight.tensor, LOCAL_PART)
            ):
                return True
        return False

    def restored(self) -> AbstractContextManager[None]:
        """Each module has the tensors of the first forward, also those that `functional_call` put there."""
        replaced = [
            weight
            for weight in self._weights
            if parameters_of(weight.owner).get(weight.name) is not weight.tensor and not _is_sharded(weight)
        ]
        keep_version = []
        if self._checksums or self._version_only:
            keep_version = [
                weight.tensor
                for number, weight in enumerate(self._weights)
                if number in self._checksums or self._is_version_only(weight)
            ]
        return self._restored(replaced, keep_version) if replaced or keep_version else _NOTHING

    @contextmanager
    def _restored(self, replaced: Sequence[_Weight], keep_version: Sequence[torch.Tensor]) -> Iterator[None]:
        now: list[tuple[dict[str, Any], str, Any]] = []
        # Leaves: a replay needs no graph of theirs, but must know that they want gradients.
        leaves: dict[torch.Tensor, torch.Tensor] = {}
        try:
            with preserve_versions(tuple(keep_version)):
                for weight in replaced:
                    there: dict[str, Any] = parameters_of(weight.owner)
                    now.append((there, weight.name, there.get(weight.name, _ABSENT)))
                    tensor = weight.tensor
                    if not tensor.is_leaf:
                        if tensor not in leaves:
                            leaves[tensor] = tensor.detach().requires_grad_()
                        tensor = leaves[tensor]
                    there[weight.name] = tensor
                yield
        finally:
            for there, name, value in now:
                if value is _ABSENT:
                    del there[name]
                else:
                    there[name] = value

    def check_after(self) -> None:
        """A replay is over: refuse if it has changed a weight, as the first forward then did, too."""
        for number in list(self._checksums):
            if not self._same_bytes(number):
                raise RuntimeError(
                    f"region {self._region!r} is under recompute, and its forward changes its weight "
                    f"{self._name(self._weights[number])!r} in place, so that it cannot be replayed; change it "
                    "outside forward, or give the region another home"
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
        inside = (name for name, module in self._modules[0].named_modules() if module is weight.owner)
        return f"{next(inside, '')}.{weight.name}".lstrip(".")

    def _refusal(self, weight: _Weight, how: str) -> RuntimeError:
        return RuntimeError(
            f"region {self._region!r} is under recompute, and its weight {self._name(weight)!r} {how} between "
            "forward and backward, so that its tensors cannot be recomputed; change it after backward, or give the "
            "region another home"
        )


def _is_sharded(weight: _Weight) -> bool:
    """Whether one of the weight and what is there now is a shard: FSDP2 gathers and shards them itself."""
    now = parameters_of(weight.owner).get(weight.name)
    return hasattr(weight.tensor, LOCAL_PART) != hasattr(now, LOCAL_PART)
