"""`ps.region(rows=, capacity=)`, the old form of `ps.rows`, which does not say of which buffer the rows are."""

from dataclasses import dataclass, field

import torch
from torch import nn

from pagestash.saved.storage import plain_storage
from pagestash.torch_internals import StorageWeakRef


@dataclass(slots=True, eq=False)
class OldForm:
    """One such region: floating buffers of `capacity` rows that come in from outside are marked."""

    name: str
    rows: torch.Tensor
    capacity: int
    made: dict[int, tuple[StorageWeakRef, bool]] = field(default_factory=dict)
    """Storages that operations inside made, and whether from weights alone."""

    def may_come_in(self, tensor: torch.Tensor, key: int, weights: set[int]) -> bool:
        """Whether the tensor may be an activation that was made outside."""
        made = self.made.get(key)
        if made is not None and not made[0].expired():
            return False
        return key not in weights and not isinstance(tensor, nn.Parameter) and tensor.is_floating_point()

    def note_made(self, results: list[torch.Tensor], keys: set[int], weights: set[int]) -> None:
        """An operation inside, with operands in the storages `keys`, gave `results`."""
        from_weights = bool(keys) and all(self.is_weight(key, weights) for key in keys)
        for result in results:
            key = plain_storage(result)
            if key is not None and key not in keys:
                self.made[key] = (StorageWeakRef(result.untyped_storage()), from_weights)

    def is_weight(self, key: int, weights: set[int]) -> bool:
        """Whether a storage is a weight's, or was computed from weights alone."""
        return key in weights or (key in self.made and self.made[key][1])
