"""The weights of a forward: a replay has the same tensors with the same bytes, or is refused by name."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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

    def __init__(self, modules: Sequence[nn.Module], region: str, checks: Checks) -> None:
        self._region = region
        self._root = modules[0]
        self._checks = checks
        self._raised: dict[int, torch.Tensor | None] = {}
        """Weights whose version forward raised, as a parametrization's `set_` does: of each a checksum after it,
        or None in a capture."""
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

    def close(self) -> None:
        """Forward is over: where it raised a version, backward must find the raised one."""
        for number, weight in enumerate(self._weights):
            version = weight.tensor._version
            if version != weight.version:
                self._weights[number] = weight._replace(version=version)
                self._raised[number] = None if capturing() else checksum(weight.tensor)

    def check(self) -> None:
        """Refuse a replay if the weights have other bytes than in forward.

        Where forward itself raises a version, another microbatch may have done so since: there, bytes are compared.
        """
        for number, weight in enumerate(self._weights):
            if weight.tensor._version != weight.version and number not in self._raised:
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
        """From here on, forward raises no version."""
        if self._raised:
            enter(preserve_versions(tuple(self._weights[number].tensor for number in self._raised)), undo)

    def check_after(self, *, at_once: bool) -> None:
        """A replay is over: where forward raises a version, its bytes must be the same. The step's end tells."""
        for number, before in self._raised.items():
            if before is not None and not capturing():
                weight = self._weights[number]
                now = checksum(weight.tensor)
                assert now is not None
                message = (
                    f"region {self._region!r} is under recompute, and its weight {self._name(weight)!r} was "
                    "changed in its forward, or between forward and backward, so that this step's gradients are "
                    "wrong; change it outside forward and after backward, or give the region another home"
                )
                if at_once and bool(now != before):
                    raise RuntimeError(message)
                self._checks.at_end(now != before, message)

    def _name(self, weight: _Weight) -> str:
        inside = (name for name, module in self._root.named_modules() if module is weight.owner)
        return f"{next(inside, '')}.{weight.name}".lstrip(".")

    def _refusal(self, weight: _Weight, how: str) -> RuntimeError:
        return RuntimeError(
            f"region {self._region!r} is under recompute, and its weight {self._name(weight)!r} {how} between "
            "forward and backward, so that its tensors cannot be recomputed; change it after backward, or give the "
            "region another home"
        )
