"""How the row axis is split over devices: two layouts, one interface.

* `stash_scan` runs **inside** a `shard_map`, or on one device (`Local`): every array is one shard's, and the shards
  agree on what to recompute by a collective over the surrounding mesh axes.
* The **layer** runs its own `shard_map`, as in MaxText (`OverMesh`): `stash_scan` sees global arrays of `shards
  × rows` rows. The buffer is split over the same axes, and each shard has its own write position.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from .geometry import Geometry

HOST = jax.memory.Space.Host


@dataclass(frozen=True, slots=True)
class Local:
    """Arrays are those of one shard."""

    axes: tuple[str, ...] | None = None
    """Mesh axes to agree over; `None`: all axes of the surrounding `shard_map`."""
    count: int = 1

    @property
    def scalar_shape(self) -> tuple[int, ...]:
        return ()

    def new_buffer(
        self, geometry: Geometry, fill: float, space: Any, varies_with: Sequence[jax.Array]
    ) -> jax.Array:
        buffer = _filled(geometry, fill, space)
        return vary_as(buffer, *varies_with)

    def map(self, each_shard: Callable[..., Any], scalars: Any, arrays: Any) -> Any:
        return each_shard(scalars, arrays)

    def everywhere(self, function: Callable[..., Any], *whole: jax.Array) -> Any:
        """Call `function` on every shard, with values that are the same on all of them."""
        return function(*whole)

    def largest(self, values: jax.Array) -> jax.Array:
        """Element-wise maximum of a vector over all shards: one reduction."""
        varying = tuple(sorted(varying_axes(values)))
        axes = varying or (
            tuple(jax.sharding.get_abstract_mesh().manual_axes) if self.axes is None else self.axes
        )
        return lax.pmax(values, axes) if axes else values


@dataclass(frozen=True, slots=True)
class OverMesh:
    """Arrays are global; their leading axis is split over `axes` of `mesh`."""

    mesh: Mesh | Any
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def scalar_shape(self) -> tuple[int, ...]:
        return (self.count,)

    def new_buffer(
        self, geometry: Geometry, fill: float, space: Any, varies_with: Sequence[jax.Array]
    ) -> jax.Array:
        return self._shard_map(lambda: _filled(geometry, fill, space), ())()

    def map(self, each_shard: Callable[..., Any], scalars: Any, arrays: Any) -> Any:
        split = PartitionSpec(self.axes)

        def on_one(scalars: Any, arrays: Any) -> Any:
            return each_shard(jax.tree.map(lambda entry: entry.reshape(()), scalars), arrays)

        return self._shard_map(on_one, (split, split))(scalars, arrays)

    def everywhere(self, function: Callable[..., Any], *whole: jax.Array) -> Any:
        spec = PartitionSpec()
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return mapped(*whole)

    def largest(self, values: jax.Array) -> jax.Array:
        return jnp.max(values, axis=0)

    def _shard_map(self, function: Callable[..., Any], in_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=PartitionSpec(self.axes), check_vma=False
        )


Shards = Local | OverMesh


def choose(mesh: Any, axes: str | Sequence[str] | None) -> Shards:
    """`OverMesh` if a mesh is given, else `Local`."""
    names = (axes,) if isinstance(axes, str) else None if axes is None else tuple(axes)
    if mesh is None:
        return Local(names)
    unknown = [name for name in names or () if name not in mesh.axis_names]
    if unknown:
        raise ValueError(f"axes {unknown} are not in the mesh, which has {tuple(mesh.axis_names)}")
    return OverMesh(mesh, tuple(mesh.axis_names) if names is None else names)


def vary_as(value: jax.Array, *others: Any) -> jax.Array:
    """`value`, marked as varying over every mesh axis that any of `others` varies over."""
    axes = frozenset().union(*map(varying_axes, others)) - varying_axes(value)
    return lax.pcast(value, tuple(sorted(axes)), to="varying") if axes else value


def varying_axes(value: Any) -> frozenset[str]:
    """Mesh axes that a value or abstract value is known to vary over; none under `check_vma=False`."""
    abstract = getattr(value, "aval", value)
    # The attribute has had two names in jax; without either, jax reports a missing mark itself.
    kind = getattr(abstract, "manual_axis_type", None)
    return frozenset(getattr(abstract, "vma", ()) if kind is None else kind.varying)


def _filled(geometry: Geometry, fill: float, space: Any) -> jax.Array:
    # In a buffer of raw bits a nonzero fill is all ones, which is NaN in every float dtype.
    word = jnp.dtype(geometry.word)
    value = fill if jnp.issubdtype(word, jnp.inexact) else (0 if fill == 0 else jnp.iinfo(word).max)
    buffer = jnp.full(geometry.shape, value, word)
    return buffer if space is None else jax.device_put(buffer, space)
