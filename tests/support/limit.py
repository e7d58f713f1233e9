"""A stand-in for a device that runs out of memory, on a CPU."""

from typing import Any

import torch

from pagestash.profiling.memory import LiveStorages


class MemoryLimit(LiveStorages):
    """Within this context operations may allocate so many bytes; one more raises `torch.OutOfMemoryError`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.now
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.now > max(before, self.most):
            raise torch.OutOfMemoryError(f"{self.now} bytes of {self.most}")
        return result
