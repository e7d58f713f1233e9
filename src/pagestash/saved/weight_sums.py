"""Which weights somebody writes to, as momentum encoders do: by sums of their bytes.

Versions do not count what is written through `.data`.
"""

from collections.abc import Iterable

import torch
from torch import nn

from pagestash.saved.storage import byte_range
from pagestash.torch_internals import LOCAL_PART


class WeightSums:
    """Parameters as they were: a sum of each one's bytes."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._before = [(parameter, _sums(parameter)) for parameter in parameters]

    def written(self) -> list[nn.Parameter]:
        """Those that have other bytes now. Waits for the device."""
        return [
            parameter
            for parameter, before in self._before
            if any(bool(old != new) for old, new in zip(before, _sums(parameter)))
        ]


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor's memory as integers: of a subclass that of its parts here, and none of a sparse tensor."""
    tensor = getattr(tensor, LOCAL_PART, tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        values = (getattr(tensor, name) for name in names)
        return [part for value in values if isinstance(value, torch.Tensor) for part in memory_of(value)]
    if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return []
    first, last = byte_range(tensor)
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage(), first, (last - first,), (1,))
    return [flat.view(torch.int64) if first % 8 == 0 and (last - first) % 8 == 0 else flat]


def _sums(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [view.sum() for view in memory_of(tensor)]
