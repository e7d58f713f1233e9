"""What to stash, how much room it gets and what happens when the room runs out.

A `StashPolicy` is the user's side of `stash_scan`; `Rows` is the layer's side (which rows of its tensors mean
something); `StashReport` is what comes back for metrics.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

OnOverflow = Literal["recompute", "poison", "error"]
Memory = Literal["device", "pinned_host"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Rows:
    """The valid rows of a layer's tagged tensors: `count` rows from row `start` on.

    A layer returns it in its second output. Both are integers, as a rule known only on the device: scalars of
    any integer type, or one entry a shard where the layer itself runs a `shard_map` and `stash_scan` is given
    the mesh. A window that reaches past the tensor means the rows that exist.
    """

    start: ArrayLike
    count: ArrayLike

    @classmethod
    def prefix(cls, count: ArrayLike) -> "Rows":
        """Valid rows packed to the front: rows `0 … count - 1`."""
        return cls(jnp.zeros_like(count), count)


class StashReport(NamedTuple):
    """How full the buffer was: integers on the device, the same on every shard.

    Rows are counted on the shard that asked for the most, which is the one the buffer has to be sized for.
    """

    rows_wanted: jax.Array
    """Rows that all layers together asked to stash, on the hottest shard."""
    rows_used: jax.Array
    """Rows that found room, on the shard where most did."""
    rows_capacity: jax.Array
    """Rows the buffer holds a shard: `capacity_factor` × expected rows × layers that stash."""
    layers_recomputed: jax.Array
    """Layers whose tensors backward computes again, because some shard had no room (`recompute` only)."""
    overflowed: jax.Array
    """Whether any layer on any shard found no room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StashPolicy:
    """The rules of one `stash_scan`.

    >>> policy = StashPolicy(names=("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"), expected_rows=65_536)
    >>> policy.on_overflow
    'recompute'
    """

    names: tuple[str, ...]
    """`checkpoint_name` tags whose tensors are stashed; their leading axis is the row axis."""
    capacity_factor: float = 1.25
    """The buffer's size as a multiple of the expected rows of all layers."""
    expected_rows: int | None = None
    """Valid rows a layer and shard; `None` takes the worst case, so that a factor of 1.0 always fits."""
    page_rows: int | Literal["auto"] = "auto"
    """Rows moved in one trip of the copy loop; has to divide the row capacity."""
    on_overflow: OnOverflow = "recompute"
    """`recompute`: right gradients at any capacity. `poison`: NaN. `error`: NaN, and an exception."""
    memory: Memory = "device"
    """Where the buffer lives."""
    keep: tuple[str, ...] = ()
    """Tags saved whole, a copy a layer, as `save_only_these_names` would; what has no tag is recomputed."""
    row_capacity: int | None = None
    """Rows of a tagged tensor on one shard, to be checked; `None` takes the size the tags agree on."""
    fill: float = 0.0
    """What fresh pages hold. NaN in a test proves that nothing reads a row that nobody wrote."""

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or isinstance(self.keep, str):
            raise TypeError("names and keep are tuples of tags, not one string: write names=('moe_mlpwo',)")
        if not self.names:
            raise ValueError(
                "names is empty, so nothing would be stashed; name at least one checkpoint_name tag"
            )
        both = set(self.names) & set(self.keep)
        if both:
            raise ValueError(
                f"{sorted(both)} are in names and in keep; a tag has one home, so remove it from one"
            )
        if self.capacity_factor < 0:
            raise ValueError(f"capacity_factor is {self.capacity_factor}; it has to be 0 or more")
        for field, value in (("expected_rows", self.expected_rows), ("row_capacity", self.row_capacity)):
            if value is not None and value < 1:
                raise ValueError(f"{field} is {value}; it has to be at least 1, or None")
        if self.page_rows != "auto" and self.page_rows < 1:
            raise ValueError(f"page_rows is {self.page_rows}; it has to be at least 1, or 'auto'")
        _one_of("on_overflow", self.on_overflow, get_args(OnOverflow))
        _one_of("memory", self.memory, get_args(Memory))

    def with_factor(self, capacity_factor: float) -> "StashPolicy":
        """The same policy with another capacity factor."""
        return replace(self, capacity_factor=capacity_factor)


def _one_of(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field} is {value!r}; it has to be one of {', '.join(map(repr, choices))}")
