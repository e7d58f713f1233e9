"""`stash_scan`: `lax.scan` over layers whose saved tensors share one buffer of valid rows.

The layer is traced once (`program`), the buffer is sized (`geometry`), and two loops under one `custom_vjp` run
forward and backward (`loops`). If the policy says so, layers that found no room are recomputed. All shards
first agree on which layers, because all of them or none must enter a layer's collectives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .checks import check_names
from .geometry import lay_out
from .loops import Inputs, Loops
from .policy import StashPolicy, StashReport
from .program import trace_layer
from .shards import choose

Layer = Callable[..., tuple[Any, Any]]


def stash_scan(
    layer: Layer | Sequence[Layer],
    x: Any,
    params: Any,
    *,
    policy: StashPolicy,
    shared: Any = None,
    mesh: Any = None,
    axes: str | Sequence[str] | None = None,
) -> tuple[Any, Any, StashReport]:
    """Scan `layer` over stacked `params`, saving the tensors that the policy names in one paged buffer.

    Args:
        layer: `layer(params_l, x) -> (x, aux)`, or `layer(params_l, x, shared)` if `shared` is given. `aux` is the
            pair `(start, count)` of valid rows, or any pytree that contains one `Rows`. Lists of layers and params
            are scanned one after the other with one buffer (dense layers first, then MoE layers, for example).
        x: the carry, any pytree; integers and random keys pass through.
        params: leaves stacked along a leading layer axis.
        policy: which tags to stash, and how large the buffer is.
        shared: values that every layer reads (a rotary table, tied weights); gradients are summed over layers.
        mesh: for a layer that runs its own `shard_map`. Inside a `shard_map`, or on one device, omit it.
        axes: axes of the mesh that the rows are split over (default: all).

    Returns the last carry, the stacked `aux` (a list of them for a list of layers), and a `StashReport`.
    Gradients are those of `lax.scan(jax.checkpoint(layer, policy=save_only_these_names(*names)), x, params)`:
    backward gets exactly the bytes that forward saved. The last digits can differ, because XLA chooses the order of
    summation in each program. Only first derivatives are supported; a second one raises an error.
    """
    several = not callable(layer)
    layers: list[Layer] = list(layer) if several else [layer]  # type: ignore[arg-type, list-item]
    stacks = list(params) if several else [params]
    if len(layers) != len(stacks) or not layers:
        raise ValueError(
            f"{len(layers)} layer functions but {len(stacks)} stacks of params; pass one stack for each function"
        )

    shards = choose(mesh, axes)
    x = jax.tree.map(_strong, x)
    shared_or_none = None if shared is None else jax.tree.map(_strong, shared)
    stacks = [jax.tree.map(jnp.asarray, stack) for stack in stacks]
    programs = []
    for one, stack in zip(layers, stacks):
        length = _layer_count(stack)
        first = jax.tree.map(lambda leaf: leaf[0], stack)
        programs.append(
            trace_layer(one, first, x, shared_or_none, layers=length, policy=policy, shards=shards.count)
        )
    check_names([program.all_tags for program in programs], policy)
    geometry = lay_out(
        [(program.tags, program.layers) for program in programs],
        capacity_factor=policy.capacity_factor,
        expected_rows=policy.expected_rows,
        page_rows=policy.page_rows,
        backend=jax.default_backend(),
    )
    loops = Loops(programs, geometry, policy, shards)

    carry, carry_tree = jax.tree.flatten(x)
    flat_shared = jax.tree.leaves(shared_or_none)
    inputs = Inputs([jax.tree.leaves(stack) for stack in stacks], carry, flat_shared)
    y, auxes, report = loops(inputs)
    trees = [jax.tree.unflatten(program.aux_tree, aux) for program, aux in zip(programs, auxes)]
    return jax.tree.unflatten(carry_tree, y), trees if several else trees[0], report


def _layer_count(stack: Any) -> int:
    leaves = jax.tree.leaves(stack)
    lengths = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(lengths) != 1 or None in lengths or 0 in lengths:
        raise ValueError(
            f"params have leading sizes {sorted(map(str, lengths))}: expected the same layer axis, of at least 1, "
            "in every leaf, so that layer l reads leaf[l]"
        )
    return leaves[0].shape[0]


def _strong(leaf: Any) -> jax.Array:
    """`leaf` as an array without a weak type, as `lax.scan` converts its carry."""
    leaf = jnp.asarray(leaf)
    return lax.convert_element_type(leaf, leaf.dtype)
