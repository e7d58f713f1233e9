"""What two runs computed, compared: by digests of all bits, and by how far values differ."""

import math
import pickle
from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from pagestash.torch_internals import LOCAL_PART
from pagestash.verifying.runs import Key

CHUNK = 1 << 20
"""Elements that are summed at once: 8 MiB of factors, and as much for the products."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digests:
    """A digest of every result of a run: with them, a run needs no copy of what another computed.

    A tensor's elements are taken as integers `x[i]`, and each chunk of them becomes `sum(x[i] * factor[i])` modulo
    2⁶⁴, with odd random factors. If one element of a chunk differs, so does the digest. If several do, the chance
    that it does not is one in 2⁶⁴, or one in 2⁴⁸ for values whose last 16 bits are all equal.
    """

    def __init__(self) -> None:
        self.of: dict[Key, list[Hashable]] = {}
        """A list, for what a wrapper and the module in it both have."""
        self._factors: dict[torch.device, torch.Tensor] = {}

    def __call__(self, key: Key, value: Any) -> None:
        self.of.setdefault(key, []).append(self._digest(value))

    def first_difference(self, other: "Digests", ignored: Set[Key]) -> Key | None:
        """The first result, in the order of this run, that the two runs do not have alike."""
        keys = (key for key in dict.fromkeys([*self.of, *other.of]) if key not in ignored)
        return next((key for key in keys if self.of.get(key) != other.of.get(key)), None)

    def place(self, key: Key | None) -> int:
        """Where a result comes in the order of this run."""
        return next((number for number, own in enumerate(self.of) if own == key), len(self.of))

    def _digest(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return tuple((part.dtype, part.shape, self._sums(part)) for part in parts_of(value))
        return pickle.dumps(value)

    def _sums(self, tensor: torch.Tensor) -> tuple[int, ...]:
        chunks = bits(tensor).split(CHUNK)
        if not tensor.numel():
            return ()
        factors = self._factors_on(tensor.device)
        sums = [(chunk.to(torch.int64) * factors[: len(chunk)]).sum() for chunk in chunks]
        return tuple(torch.stack(sums).tolist())

    def _factors_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._factors:
            generator = torch.Generator().manual_seed(0)
            factors = torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=generator) | 1
            self._factors[device] = factors.to(device)
        return self._factors[device]


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that a tensor consists of; of a distributed one, this rank's."""
    tensor = getattr(tensor, LOCAL_PART, tensor)
    if hasattr(tensor, "__tensor_flatten__"):  # as a jagged one has
        names, _ = tensor.__tensor_flatten__()
        values = (getattr(tensor, name) for name in names)
        return [part for value in values if isinstance(value, torch.Tensor) for part in parts_of(value)]
    if tensor.layout == torch.strided:
        return [] if tensor.is_meta else [tensor]
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    coo = tensor.detach().to_sparse_coo().coalesce()
    return [coo.indices(), coo.values()]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a strided tensor as integers in one row: two NaN are equal if their bits are."""
    flat = tensor.detach().resolve_conj().resolve_neg()
    if flat.is_quantized:
        flat = flat.int_repr()
    if flat.dtype == torch.complex128:
        flat = torch.view_as_real(flat)
    return flat.contiguous().view(-1).view(INTEGERS[flat.element_size()])


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the elements of one tensor differ."""

    count: int
    """Elements with other bits."""
    elements: int
    largest: float
    """The largest absolute difference."""
    scale: float
    """The largest absolute value."""

    @property
    def relative(self) -> float:
        """To the largest value; NaN where a difference is."""
        return self.largest / self.scale if self.count and self.scale else self.largest

    @property
    def order(self) -> float:
        """To find the largest by: NaN is larger than any."""
        return math.inf if math.isnan(self.relative) else self.relative

    def __str__(self) -> str:
        return f"{self.count:,} of {self.elements:,} elements, by at most {self.largest:.3g} (of {self.scale:.3g})"


@dataclass(slots=True)
class Copies:
    """Copies of results on the host, of those that are `wanted`."""

    wanted: Callable[[Key], bool]
    of: dict[Key, list[torch.Tensor]] = field(default_factory=dict)

    def __call__(self, key: Key, value: Any) -> None:
        if isinstance(value, torch.Tensor) and self.wanted(key):
            self.of[key] = [part.detach().to("cpu", copy=True) for part in parts_of(value)]


@dataclass(slots=True)
class Distances:
    """How far the results of a run are from those of which there are copies."""

    copies: Copies
    of: dict[Key, Distance] = field(default_factory=dict)

    def __call__(self, key: Key, value: Any) -> None:
        if key in self.copies.of and isinstance(value, torch.Tensor):
            mine = [part.detach().to("cpu") for part in parts_of(value)]
            theirs = self.copies.of[key]
            if [part.shape for part in mine] == [part.shape for part in theirs]:
                self.of[key] = _distance(mine, theirs)


def _distance(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> Distance:
    count, differences, values = 0, [torch.zeros(1)], [torch.zeros(1)]
    for own, other in zip(mine, theirs):
        wide = torch.complex128 if own.is_complex() else torch.float64
        other_bits = bits(own) != bits(other.to(own.dtype))
        left, right = (part.contiguous().view(-1).to(wide) for part in (own, other))
        count += int(other_bits.sum())
        differences.append((left - right)[other_bits].abs())
        values.append(right.abs())
    largest, scale = (float(torch.cat(each).max()) for each in (differences, values))  # NaN, if there is one
    return Distance(count, sum(part.numel() for part in mine), largest, scale)
