"""JAX: `stash_scan` in place of `lax.scan`. One buffer for what all layers save, valid rows only.

    python examples/jax_scan.py

Compares gradients with those of a plain scan over the same layers.
"""

import argparse

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pagestash.jax import Rows, StashPolicy, stash_scan

Tree = dict[str, jax.Array]


def layer(params: Tree, x: jax.Array) -> tuple[jax.Array, Rows]:
    """The first `count` rows of `x` are valid; tags name the tensors that backward needs."""
    valid = jnp.arange(x.shape[0])[:, None] < params["count"]
    hidden = checkpoint_name(x @ params["up"], "hidden")
    out = checkpoint_name(jax.nn.silu(hidden) @ params["down"], "out")
    return x + jnp.where(valid, jnp.tanh(out), 0), Rows.prefix(params["count"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=256, help="the worst case")
    parser.add_argument("--width", type=int, default=64)
    asked = parser.parse_args(arguments)

    keys = jax.random.split(jax.random.key(0), 4)
    shape = (asked.layers, asked.width, asked.width)
    weights = {"up": jax.random.normal(keys[0], shape) / 8, "down": jax.random.normal(keys[1], shape) / 8}
    counts = jax.random.randint(keys[2], (asked.layers,), asked.rows // 8, 3 * asked.rows // 8)
    x = jax.random.normal(keys[3], (asked.rows, asked.width))
    policy = StashPolicy(names=("hidden", "out"), expected_rows=asked.rows // 4, capacity_factor=1.5)

    def plain(weights: Tree) -> jax.Array:
        y, _ = lax.scan(lambda x, params: layer(params, x), x, {**weights, "count": counts})
        return jnp.mean(y * y)

    def stashed(weights: Tree) -> tuple[jax.Array, object]:
        y, _, report = stash_scan(layer, x, {**weights, "count": counts}, policy=policy)
        return jnp.mean(y * y), report

    expected = jax.jit(jax.grad(plain))(weights)
    found, report = jax.jit(jax.grad(stashed, has_aux=True))(weights)
    # Two programs, compiled separately: XLA may round them differently in the last bits.
    apart = max(
        float(jnp.abs(a - b).max() / jnp.abs(a).max()) for a, b in zip(expected.values(), found.values())
    )
    print(
        f"{report.rows_wanted} rows wanted, room for {report.rows_capacity}, worst case {asked.layers * asked.rows}"
    )
    print(f"layers recomputed for want of room: {report.layers_recomputed}")
    print(f"gradients are those of the plain scan: {apart < 1e-5}")


if __name__ == "__main__":
    main()
