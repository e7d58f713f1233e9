"""What a layer without room shows to the outside, where the policy is not to compute it again."""

from typing import Any

import jax
import jax.numpy as jnp

from .policy import StashReport


class StashOverflow(RuntimeError):
    """A layer's rows found no room, under `on_overflow="error"`. Reaches Python inside jax's own runtime error."""


def poisoned(overflowed: jax.Array, leaves: list[Any]) -> list[Any]:
    """The leaves, with every number NaN if anything overflowed."""
    return [
        jnp.where(overflowed, jnp.full((), jnp.nan, leaf.dtype), leaf)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
        else leaf
        for leaf in leaves
    ]


def raise_on(report: StashReport) -> None:
    """Raise `StashOverflow` from the device's program if anything overflowed."""
    message = (
        "stash overflow: {wanted} rows wanted and {capacity} in the buffer; raise capacity_factor, "
        "or use on_overflow='recompute'"
    )

    def on_host(overflowed: Any, wanted: Any, capacity: Any) -> None:
        if overflowed:
            raise StashOverflow(message.format(wanted=int(wanted), capacity=int(capacity)))

    jax.debug.callback(on_host, report.overflowed, report.rows_wanted, report.rows_capacity)
