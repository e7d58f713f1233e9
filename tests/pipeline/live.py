"""Bytes of tensors that are alive: what an allocator would hold."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Notes the storage of every result made inside it, without keeping any alive."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self.known.setdefault(storage._cdata, StorageWeakRef(storage))
        return result

    def sizes(self):
        """The sizes of the storages that are alive now."""
        storages = [torch.UntypedStorage._new_with_weak_ptr(cdata) for cdata in self.known]
        return [storage.nbytes() for storage in storages if storage is not None]

    def bytes(self):
        return sum(self.sizes())
