"""Saved tensors of which a step fills a varying number of rows, as a profile has them.

Such a tensor has room for `capacity` rows, and the measured step filled the first of them. Where a fused expert
layer expects rows (`expected_rows`), a second tensor of the same region holds those: its *head*, which a stash rule
leaves where it is, or offloads in part (its `fraction`).
"""

import re
from dataclasses import dataclass, field

from pagestash.profiling.expected_rows import find_heads, has_spare_rows
from pagestash.profiling.profiled import ProfiledStep


@dataclass(frozen=True, slots=True)
class RowTensor:
    """One storage of rows."""

    pair: str
    """Its layer, and microbatch if there are several: all tensors of a pair receive the same rows."""
    row_bytes: int
    capacity: int
    valid_rows: int
    expected_rows: int = 0
    """Rows in the head, beside `capacity`."""

    @property
    def received(self) -> int:
        """Rows that the measured step received: at most, if it filled no more than the head."""
        return self.expected_rows + self.valid_rows


@dataclass(frozen=True, slots=True)
class RowTensors:
    """All of a profile, by the number of their storage, and the heads."""

    tensors: dict[int, RowTensor] = field(default_factory=dict)
    heads: frozenset[int] = frozenset()
    fused: bool = False
    """Whether any is of a fused expert layer, which takes `expected_rows`."""

    def received(self) -> dict[str, int]:
        """By pair."""
        found: dict[str, int] = {}
        for tensor in self.tensors.values():
            found[tensor.pair] = max(found.get(tensor.pair, 0), tensor.received)
        return found

    @property
    def exact(self) -> bool:
        """Whether `received` is: each pair filled more than its head."""
        return all(tensor.valid_rows or not tensor.expected_rows for tensor in self.tensors.values())


def find_row_tensors(profile: ProfiledStep) -> RowTensors:
    """The row tensors of a profile: those that the measured step did not fill."""
    heads = find_heads(profile.tensors, profile.regions)
    found: dict[int, RowTensor] = {}
    for tensor in profile.tensors:
        if not has_spare_rows(tensor):
            continue
        head = heads.get(tensor.storage)
        row_bytes = tensor.bytes // tensor.shape[0]
        found[tensor.storage] = RowTensor(
            _pair(tensor.region),
            row_bytes,
            tensor.shape[0],
            tensor.valid_bytes // row_bytes,
            0 if head is None else head.shape[0],
        )
    fused = {region.name for region in profile.regions if region.within != region.name}
    is_fused = any(tensor.region in fused for tensor in profile.tensors if tensor.storage in found)
    return RowTensors(found, frozenset(head.storage for head in heads.values()), is_fused)


def _pair(region: str) -> str:
    name, at, microbatch = region.partition("@")
    layer = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", name)
    return (layer[0] if layer else name) + at + microbatch
