"""The tensors of expected rows in a profile (*heads*), which a stash rule leaves where they are, or offloads.

A fused expert layer with `expected_rows` saves two tensors for each that it needs: one of the expected rows, full
by definition, and one of the rows in excess, of which a step fills some. A profile tells them by their shapes.
"""

from collections.abc import Mapping, Sequence

from pagestash.profiling.records import Region, SavedTensor


def find_heads(tensors: Sequence[SavedTensor], regions: Sequence[Region]) -> Mapping[int, SavedTensor]:
    """By the storage of a tensor of excess rows: the tensor of the expected rows before them."""
    fused = {region.name for region in regions if region.within != region.name}
    full = {
        _like(tensor): tensor for tensor in reversed(tensors) if tensor.region in fused and _is_full(tensor)
    }
    found = ((tensor.storage, full.get(_like(tensor))) for tensor in tensors if has_spare_rows(tensor))
    return {storage: head for storage, head in found if head is not None}


def has_spare_rows(tensor: SavedTensor) -> bool:
    """Whether the measured step left some of its rows unfilled."""
    if tensor.kind != "activation" or not tensor.counted or not tensor.shape or not tensor.shape[0]:
        return False
    return tensor.valid_bytes < tensor.bytes and not tensor.valid_bytes % (tensor.bytes // tensor.shape[0])


def _is_full(tensor: SavedTensor) -> bool:
    return tensor.counted > 0 and tensor.valid_bytes == tensor.bytes


def _like(tensor: SavedTensor) -> tuple[str, str, tuple[int, ...]]:
    """The same for a head and the tensor of the rows beyond it."""
    return tensor.region, tensor.dtype, tensor.shape[1:]
