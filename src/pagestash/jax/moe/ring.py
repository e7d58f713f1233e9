"""A ring-of-experts MoE layer: all-gather the tokens, run the local experts, reduce-scatter the sums.

Legend: t tokens of this shard, T tokens of all shards (T = EP·t), D model width, F expert width, E experts,
e experts of this shard (e = E/EP), K experts per token, A assignments (A = T·K), N row capacity of this shard
(N = T·min(K, e)); B batch, b batch of this shard, S sequence.

Every shard has every token and computes the assignments to its own experts. Only the device knows how many
there are. No token is dropped, so the tensors have N rows, of which the first `count` are valid.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..policy import Rows
from ..sizing import worst_case_rows

# MaxText's names of the three projections, so that one policy works with both.
WI_0, WI_1, WO = "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"
STASHED = (WI_0, WI_1, WO)
# The sorted input, which MaxText does not name. If it is stashed, too, backward does not gather and sort again.
X_SORTED = "moe_x_sorted"


@dataclass(frozen=True, kw_only=True, slots=True)
class RingConfig:
    """Sizes of one MoE layer."""

    width: int
    expert_width: int
    experts: int
    top_k: int
    shards: int = 1
    """Size of the expert axis (EP)."""

    def __post_init__(self) -> None:
        if self.experts % self.shards:
            raise ValueError(
                f"{self.experts} experts cannot be split over {self.shards} shards; choose a divisor"
            )
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"top_k is {self.top_k}; it has to be from 1 to {self.experts}, the number of experts"
            )

    @property
    def local_experts(self) -> int:
        return self.experts // self.shards

    def row_capacity(self, tokens: int) -> int:
        """N for `tokens` tokens over all shards."""
        return worst_case_rows(
            batch=1, ep=self.shards, seq=tokens // self.shards, top_k=self.top_k, num_experts=self.experts
        )


class ExpertWeights(NamedTuple):
    """Router and gated experts; experts are split over the mesh, the router is replicated."""

    router_DE: jax.Array
    wi_0_eDF: jax.Array
    wi_1_eDF: jax.Array
    wo_eFD: jax.Array


def init_experts(key: jax.Array, config: RingConfig, dtype: Any = jnp.float32) -> ExpertWeights:
    """Weights of all experts, at variance 1 / fan-in."""
    keys = jax.random.split(key, 4)
    d, f, e = config.width, config.expert_width, config.experts

    def draw(key: jax.Array, *shape: int) -> jax.Array:
        return (jax.random.normal(key, shape) * shape[-2] ** -0.5).astype(dtype)

    return ExpertWeights(
        draw(keys[0], d, e), draw(keys[1], e, d, f), draw(keys[2], e, d, f), draw(keys[3], e, f, d)
    )


class Routing(NamedTuple):
    """Which rows this shard computes: sorted by expert, valid rows first."""

    slots_N: jax.Array
    """The assignment (token · K + choice) of each row."""
    rows_TK: jax.Array
    """The row of each assignment; `held` or more if another shard computes it."""
    weights_TK: jax.Array
    sizes_e: jax.Array
    held: jax.Array
    """Valid rows: the sum of `sizes_e`."""


def ring_moe(
    weights: ExpertWeights, x_tD: jax.Array, config: RingConfig, axis: str | None = None
) -> tuple[jax.Array, Rows, jax.Array]:
    """One shard's part of the layer; runs inside `shard_map` over `axis`.

    Returns the output for this shard's tokens, the valid rows, and the load-balancing loss. With `axis=None`
    the given tokens count as those of all shards, and only shard 0's experts run: the work of one device,
    without a mesh.
    """
    logits_tE = x_tD.astype(jnp.float32) @ weights.router_DE.astype(jnp.float32)
    if axis is None:
        x_TD, logits_TE, shard = x_tD, logits_tE, jnp.int32(0)
    else:
        x_TD = lax.all_gather(x_tD, axis, tiled=True)
        logits_TE = lax.all_gather(logits_tE, axis, tiled=True)
        shard = lax.axis_index(axis)
    routing, balance = route(logits_TE, config, shard)
    y_TD = run_experts(weights, x_TD, routing)
    y_tD = y_TD if axis is None else lax.psum_scatter(y_TD, axis, scatter_dimension=0, tiled=True)
    return y_tD, Rows.prefix(routing.held), balance


def route(logits_TE: jax.Array, config: RingConfig, shard: jax.Array) -> tuple[Routing, jax.Array]:
    """Top-k over all experts, then a sort that brings this shard's assignments to the front."""
    tokens, k, local = logits_TE.shape[0], config.top_k, config.local_experts
    probabilities_TE = jax.nn.softmax(logits_TE, axis=-1)
    weights_TK, experts_TK = lax.top_k(probabilities_TE, k)
    weights_TK = weights_TK / weights_TK.sum(-1, keepdims=True)

    expert_A = experts_TK.reshape(-1) - shard * local
    mine_A = (expert_A >= 0) & (expert_A < local)
    order_A = jnp.argsort(jnp.where(mine_A, expert_A, local), stable=True)
    sizes_e = jnp.sum(expert_A[:, None] == jnp.arange(local), axis=0, dtype=jnp.int32)
    places_A = jnp.arange(tokens * k, dtype=order_A.dtype)
    rows_A = jnp.zeros_like(order_A).at[order_A].set(places_A, unique_indices=True)
    # A token has at most min(K, e) assignments here, so every valid row is among the first N.
    slots_N = order_A[: config.row_capacity(tokens)]

    chosen_E = jnp.mean(jax.nn.one_hot(experts_TK, config.experts).sum(1), axis=0) / k
    balance = config.experts * jnp.sum(chosen_E * jnp.mean(probabilities_TE, axis=0))
    routing = Routing(slots_N, rows_A.reshape(tokens, k), weights_TK, sizes_e, jnp.sum(sizes_e))
    return routing, balance


def run_experts(weights: ExpertWeights, x_TD: jax.Array, routing: Routing) -> jax.Array:
    """Sort, three grouped matmuls, weighted unsort."""
    xs_ND = checkpoint_name(sort_rows(x_TD, routing.slots_N, routing.rows_TK, routing.held), X_SORTED)
    h0_NF = checkpoint_name(lax.ragged_dot(xs_ND, weights.wi_0_eDF, routing.sizes_e), WI_0)
    h1_NF = checkpoint_name(lax.ragged_dot(xs_ND, weights.wi_1_eDF, routing.sizes_e), WI_1)
    out_ND = checkpoint_name(lax.ragged_dot(jax.nn.silu(h0_NF) * h1_NF, weights.wo_eFD, routing.sizes_e), WO)
    out_TKD = unsort_rows(out_ND, routing.slots_N, routing.rows_TK, routing.held)
    return jnp.einsum("tk,tkd->td", routing.weights_TK.astype(out_TKD.dtype), out_TKD)


# `sort_rows` and `unsort_rows` are each other's transpose. With these custom gradients backward gathers.
# Autodiff would scatter-add, which on a GPU is slow and adds in a different order every time.


@jax.custom_vjp
def sort_rows(x_TD: jax.Array, slots_N: jax.Array, rows_TK: jax.Array, count: jax.Array) -> jax.Array:
    """The token of each row; rows past `count` are zero."""
    rows_ND = x_TD[slots_N // rows_TK.shape[1]]
    return jnp.where((jnp.arange(slots_N.shape[0]) < count)[:, None], rows_ND, 0)


@jax.custom_vjp
def unsort_rows(out_ND: jax.Array, slots_N: jax.Array, rows_TK: jax.Array, count: jax.Array) -> jax.Array:
    """The row of each assignment; zero if another shard computes it."""
    return _assigned_rows(out_ND, rows_TK, count)


def _assigned_rows(out_ND: jax.Array, rows_TK: jax.Array, count: jax.Array) -> jax.Array:
    held_TK = jnp.where(rows_TK < count, rows_TK, 0)
    return jnp.where((rows_TK < count)[..., None], out_ND[held_TK], 0)


def _sort_forward(x_TD: jax.Array, slots_N: jax.Array, rows_TK: jax.Array, count: jax.Array) -> Any:
    return sort_rows(x_TD, slots_N, rows_TK, count), (rows_TK, count)


def _sort_backward(saved: Any, g_ND: jax.Array) -> Any:
    return _assigned_rows(g_ND, *saved).sum(1), None, None, None


def _unsort_forward(out_ND: jax.Array, slots_N: jax.Array, rows_TK: jax.Array, count: jax.Array) -> Any:
    return unsort_rows(out_ND, slots_N, rows_TK, count), (slots_N, count)


def _unsort_backward(saved: Any, g_TKD: jax.Array) -> Any:
    slots_N, count = saved
    g_ND = g_TKD.reshape(-1, g_TKD.shape[-1])[slots_N]
    return jnp.where((jnp.arange(slots_N.shape[0]) < count)[:, None], g_ND, 0), None, None, None


sort_rows.defvjp(_sort_forward, _sort_backward)
unsort_rows.defvjp(_unsort_forward, _unsort_backward)


def ring_moe_over(mesh: Any, config: RingConfig, axis: str = "expert") -> Any:
    """`ring_moe` as a function of global arrays: `(weights, x_BSD) -> (y_BSD, rows, balance)`.

    `axis` splits the batch and the experts; the returned rows have one entry per shard.
    """
    split, whole = jax.P(axis), jax.P()

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(ExpertWeights(whole, split, split, split), split),  # type: ignore[arg-type]
        out_specs=(split, split, whole),
        check_vma=False,
    )
    def layer(weights: ExpertWeights, x_bSD: jax.Array) -> tuple[jax.Array, Rows, jax.Array]:
        y_tD, rows, balance = ring_moe(weights, x_bSD.reshape(-1, config.width), config, axis)
        return y_tD.reshape(x_bSD.shape), jax.tree.map(lambda value: value[None], rows), balance

    return layer
