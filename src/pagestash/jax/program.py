"""A layer, traced once: its forward with the values that backward needs, and its backward as a function of them.

`jax.vjp` returns a pytree whose leaves are the saved values. Under `jax.checkpoint` with a policy of names
these leaves are the layer's inputs and the tagged tensors, nothing else. So everything that a layer saves is
known before anything runs, and each kind of value has its home:

    input      exists already: parameters are not copied, the carry is saved once per layer
    tagged     valid rows only, in the shared buffer
    computed   whole, stacked by the scan (the policy's `keep` tags)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .checks import called, checked_tags, find_rows, hoisted_constants, matching_carry
from .geometry import Tag
from .policy import Rows, StashPolicy
from .tags import Computed, FromConstant, FromInput, FromTag, Origin, origin_of, tags_in, used_inputs

Leaves = list[Any]


@dataclass(frozen=True, slots=True)
class Split:
    """Which leaves of a list are differentiated; integers and random keys are not."""

    differentiable: tuple[bool, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> "Split":
        return cls(tuple(jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact) for leaf in leaves))

    def take(self, leaves: Sequence[Any]) -> tuple[Leaves, Leaves]:
        """The differentiated leaves and the others."""
        yes = [leaf for leaf, keep in zip(leaves, self.differentiable, strict=True) if keep]
        no = [leaf for leaf, keep in zip(leaves, self.differentiable, strict=True) if not keep]
        return yes, no

    def join(self, yes: Sequence[Any], no: Sequence[Any]) -> Leaves:
        first, second = iter(yes), iter(no)
        return [next(first) if keep else next(second) for keep in self.differentiable]


@dataclass(frozen=True, slots=True)
class LayerProgram:
    """One group of layers: forward and backward of one layer, and what it saves."""

    layers: int
    params: Split
    carry: Split
    shared: Split
    aux: Split
    aux_tree: Any
    rows_at: tuple[int, int] | None
    """Positions of start and count among the leaves of aux."""
    hoisted: Leaves
    """Traced integers and keys that the layer closes over."""
    forward: core.ClosedJaxpr
    """(params, carry, shared, hoisted) → carry, aux, saved values."""
    origins: tuple[Origin, ...]
    vjp_tree: Any
    carry_used: tuple[bool, ...]
    stashed: tuple[int, ...]
    """Positions of tagged values among the saved ones."""
    kept: tuple[int, ...]
    """Positions of computed values among the saved ones."""
    tags: tuple[Tag, ...]
    all_tags: frozenset[str]

    def run(
        self, params: Leaves, carry: Leaves, shared: Leaves, hoisted: Leaves
    ) -> tuple[Leaves, Leaves, Leaves, Leaves]:
        """Carry, aux, stashed tensors and kept tensors of one layer."""
        flat = core.jaxpr_as_fun(self.forward)(*params, *carry, *shared, *hoisted)
        # A constant output is a Python number.
        flat = [
            value if isinstance(value, jax.Array) else jnp.asarray(value, aval.dtype)
            for value, aval in zip(flat, self.forward.out_avals)
        ]
        n_carry, n_aux = len(carry), len(self.aux.differentiable)
        saved = flat[n_carry + n_aux :]
        return (
            flat[:n_carry],
            flat[n_carry : n_carry + n_aux],
            [saved[i] for i in self.stashed],
            [saved[i] for i in self.kept],
        )

    @property
    def stashed_avals(self) -> list[Any]:
        at = len(self.carry.differentiable) + len(self.aux.differentiable)
        return [self.forward.out_avals[at + position] for position in self.stashed]

    @property
    def rows_avals(self) -> list[Any]:
        assert self.rows_at is not None
        return [self.forward.out_avals[len(self.carry.differentiable) + place] for place in self.rows_at]

    def rows(self, aux: Leaves) -> Rows:
        assert self.rows_at is not None, "only layers that stash are asked for their rows"
        return Rows(aux[self.rows_at[0]], aux[self.rows_at[1]])

    def backward(
        self, inputs: Leaves, stashed: Leaves, kept: Leaves, carry_cotangent: Leaves, aux_cotangent: Leaves
    ) -> tuple[Leaves, Leaves, Leaves]:
        """Cotangents of the differentiated params, carry and shared leaves."""
        saved: Leaves = [None] * len(self.origins)
        # A value that is saved twice is stored once, under its first position.
        for position, value in zip((*self.stashed, *self.kept), (*stashed, *kept)):
            saved[position] = value
        for position, origin in enumerate(self.origins):
            match origin:
                case FromInput(index):
                    saved[position] = inputs[index]
                case FromConstant(value):
                    saved[position] = jnp.asarray(value)
                case _ if saved[position] is None:
                    saved[position] = saved[self._first_place(position)]
        vjp = jax.tree.unflatten(self.vjp_tree, saved)
        cotangents = vjp((carry_cotangent, aux_cotangent))
        return tuple(list(part) for part in cotangents)  # type: ignore[return-value]

    def _first_place(self, position: int) -> int:
        outvars = self.forward.jaxpr.outvars[len(self.carry.differentiable) + len(self.aux.differentiable) :]
        return next(i for i in (*self.stashed, *self.kept) if outvars[i] is outvars[position])


def trace_layer(
    layer: Callable[..., tuple[Any, Any]],
    params: Any,
    carry: Any,
    shared: Any,
    *,
    layers: int,
    policy: StashPolicy,
    shards: int,
) -> LayerProgram:
    """Trace one layer of a group (`params` already without the layer axis) and list what it saves."""
    param_leaves, param_tree = jax.tree.flatten(params)
    carry_leaves, carry_tree = jax.tree.flatten(carry)
    shared_leaves, shared_tree = jax.tree.flatten(shared)
    n_params, n_carry, n_shared = len(param_leaves), len(carry_leaves), len(shared_leaves)
    seen: dict[str, Any] = {}

    def flat_layer(*flat: Any) -> Leaves:
        given = (
            jax.tree.unflatten(param_tree, flat[:n_params]),
            jax.tree.unflatten(carry_tree, flat[n_params : n_params + n_carry]),
        )
        rest = flat[n_params + n_carry :]
        with_shared = given if shared is None else (*given, jax.tree.unflatten(shared_tree, rest))
        result = layer(*with_shared)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(f"{called(layer)} returned {type(result).__name__}: expected a pair (carry, aux)")
        new_carry, aux = result
        out_leaves = matching_carry(layer, carry, new_carry)
        seen["rows_at"] = find_rows(layer, aux)
        aux_leaves, seen["aux_tree"] = jax.tree.flatten(aux)
        return [*out_leaves, *map(jnp.asarray, aux_leaves)]

    traced = jax.make_jaxpr(flat_layer)(*param_leaves, *carry_leaves, *shared_leaves)
    hoisted = hoisted_constants(layer, traced)
    aux_avals = traced.out_avals[n_carry:]
    params_split, carry_split, shared_split = (
        Split.of(x) for x in (param_leaves, carry_leaves, shared_leaves)
    )
    aux_split = Split(tuple(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in aux_avals))

    def forward(*flat: Any) -> Leaves:
        p, c, s, h = _cut(flat, n_params, n_carry, n_shared)
        (p_diff, p_rest), (c_diff, c_rest), (s_diff, s_rest) = (
            split.take(part) for split, part in ((params_split, p), (carry_split, c), (shared_split, s))
        )

        def differentiated(p_diff: Leaves, c_diff: Leaves, s_diff: Leaves) -> Any:
            consts = iter(h)
            values = [next(consts) if isinstance(c, jax.core.Tracer) else c for c in traced.consts]
            closed = core.ClosedJaxpr(traced.jaxpr, values)
            out = core.jaxpr_as_fun(closed)(
                *params_split.join(p_diff, p_rest),
                *carry_split.join(c_diff, c_rest),
                *shared_split.join(s_diff, s_rest),
            )
            carry_diff, carry_rest = carry_split.take(out[:n_carry])
            aux_diff, aux_rest = aux_split.take(out[n_carry:])
            return (carry_diff, aux_diff), (carry_rest, aux_rest)

        names = jax.checkpoint_policies.save_only_these_names(*policy.names, *policy.keep)
        # Forward and backward are two loops, so XLA cannot merge operations of one into the other.
        checkpointed = jax.checkpoint(differentiated, policy=names, prevent_cse=False)
        (carry_diff, aux_diff), vjp, (carry_rest, aux_rest) = jax.vjp(
            checkpointed, p_diff, c_diff, s_diff, has_aux=True
        )
        saved, seen["vjp_tree"] = jax.tree.flatten(vjp)
        return [*carry_split.join(carry_diff, carry_rest), *aux_split.join(aux_diff, aux_rest), *saved]

    program = jax.make_jaxpr(forward)(*param_leaves, *carry_leaves, *shared_leaves, *hoisted)
    outvars = program.jaxpr.outvars[n_carry + len(aux_avals) :]
    origins = tuple(origin_of(program.jaxpr, program.consts, var) for var in outvars)
    stashed = _distinct(outvars, origins, lambda o: isinstance(o, FromTag) and o.all_in(policy.names))
    kept = _distinct(
        outvars,
        origins,
        lambda o: isinstance(o, Computed) or (isinstance(o, FromTag) and not o.all_in(policy.names)),
    )
    all_tags = frozenset(tags_in(traced.jaxpr))
    tags = checked_tags(layer, [(origins[i], outvars[i].aval) for i in stashed], policy, shards)
    if tags and seen["rows_at"] is None:
        raise ValueError(
            f"{called(layer)} tags {', '.join(sorted({t.name for t in tags}))} for the stash but returns no "
            "valid rows; return (carry, Rows(start, count)), or put a pagestash.jax.Rows anywhere in aux"
        )
    used = used_inputs(traced.jaxpr)
    return LayerProgram(
        layers=layers,
        params=params_split,
        carry=carry_split,
        shared=shared_split,
        aux=aux_split,
        aux_tree=seen["aux_tree"],
        rows_at=seen["rows_at"],
        hoisted=hoisted,
        forward=program,
        origins=origins,
        vjp_tree=seen["vjp_tree"],
        carry_used=tuple(n_params + i in used or _is_key(leaf) for i, leaf in enumerate(carry_leaves)),
        stashed=stashed,
        kept=kept,
        tags=tags,
        all_tags=all_tags,
    )


def _distinct(
    outvars: Sequence[Any], origins: Sequence[Origin], wanted: Callable[[Origin], bool]
) -> tuple[int, ...]:
    first: dict[Any, int] = {}
    for position, (var, origin) in enumerate(zip(outvars, origins)):
        if wanted(origin):
            first.setdefault(var, position)
    return tuple(first.values())


def _is_key(leaf: Any) -> bool:
    # A key has no zero that could replace it, so it is always saved; it is a few bytes.
    return jnp.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.extended)


def _cut(flat: Sequence[Any], *sizes: int) -> list[Leaves]:
    parts, at = [], 0
    for size in sizes:
        parts.append(list(flat[at : at + size]))
        at += size
    return [*parts, list(flat[at:])]
