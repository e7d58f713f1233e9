"""What to stash, how large the buffer is, and what happens when it is full.

The user passes a `StashPolicy` to `stash_scan`, a layer returns `Rows` (which rows of its tensors are valid), and
`stash_scan` returns a `StashReport` for metrics.
"""

from dataclasses import dataclass
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

    A layer returns it in its second output. Both are integers, usually known only on the device: scalars of any
    integer type, or arrays with one entry per shard if the layer runs its own `shard_map` and `stash_scan` is given
    the mesh. A range that reaches past the tensor means the rows that exist.
    """

    start: ArrayLike
    count: ArrayLike

    @classmethod
    def prefix(cls, count: ArrayLike) -> "Rows":
        """Valid rows packed to the front: rows `0 … count - 1`."""
        return cls(jnp.zeros_like(count), count)


class StashReport(NamedTuple):
    """How full the buffer was: integers on the device, the same on every shard.

    Rows are counted on the hottest shard, for which the buffer must be sized.
    """

    rows_wanted: jax.Array
    """Rows that all layers together wanted to stash, on the hottest shard."""
    rows_used: jax.Array
    """Rows that were stashed, on the shard that stashed the most."""
    rows_capacity: jax.Array
    """Rows that the buffer of one shard holds: `capacity_factor` × expected rows × layers that stash."""
    layers_recomputed: jax.Array
    """Layers that backward recomputes, because some shard had no room (`recompute` only)."""
    overflowed: jax.Array
    """Whether any layer on any shard found no room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StashPolicy:
    """The rules of one `stash_scan`.

    Examples:
        >>> policy = StashPolicy(names=("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"), expected_rows=65_536)
        >>> policy.on_overflow
        'recompute'
    """

    names: tuple[str, ...]
    """`checkpoint_name` tags whose tensors are stashed; their leading axis is the row axis."""
    capacity_factor: float = 1.25
    """The buffer's size as a multiple of the expected rows of all layers."""
    expected_rows: int | None = None
    """Valid rows per layer and shard; `None`: the worst case, so that a factor of 1.0 always fits."""
    page_rows: int | Literal["auto"] = "auto"
    """Rows copied per iteration of the copy loop; must divide the row capacity."""
    on_overflow: OnOverflow = "recompute"
    """`recompute`: right gradients at any capacity. `poison`: NaN. `error`: NaN, and an exception."""
    memory: Memory = "device"
    """Where the buffer is allocated."""
    keep: tuple[str, ...] = ()
    """Tags saved whole, one copy per layer, as by `save_only_these_names`; values without a tag are recomputed."""
    row_capacity: int | None = None
    """Rows that a tagged tensor must have on one shard; `None`: the size that the tags agree on."""
    fill: float = 0.0
    """Initial contents of the buffer. NaN in a test exposes any read of a row that was never written."""

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


def _one_of(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field} is {value!r}; it has to be one of {', '.join(map(repr, choices))}")
