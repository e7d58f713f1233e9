"""The forward and the backward loop over layers, and the `custom_vjp` around them.

Forward carries the buffer through the loop and pushes each layer's tagged tensors. Backward runs in reverse,
pops them and calls the layer's VJP. Between the two, the shards agree once on which layers found no room.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .checks import first_order_only
from .geometry import Geometry, GroupGeometry
from .overflow import poisoned, raised_on
from .pages import Placement, place, pop, push
from .policy import StashPolicy, StashReport
from .program import LayerProgram, Leaves
from .shards import HOST, Shards, vary_as, varying_axes


class Inputs(NamedTuple):
    params: list[Leaves]
    carry: Leaves
    shared: Leaves


class Saved(NamedTuple):
    """What one group of layers saves for backward; every leaf has a leading layer axis."""

    carry: Leaves
    kept: Leaves
    placement: Placement | None


class Loops:
    """The forward and backward loops of one `stash_scan`, and the `custom_vjp` around them."""

    def __init__(
        self, programs: list[LayerProgram], geometry: Geometry, policy: StashPolicy, shards: Shards
    ) -> None:
        self.programs = programs
        self.geometry = geometry
        self.policy = policy
        self.shards = shards
        self.space = HOST if policy.memory == "pinned_host" else None

    def __call__(self, inputs: Inputs) -> tuple[Leaves, list[Leaves], StashReport]:
        """Run under a `custom_vjp`; arguments that are not differentiated are passed apart."""
        differentiable, fixed = self._split(inputs)
        hoisted = [program.hoisted for program in self.programs]

        @jax.custom_vjp
        def run(differentiable: Any, fixed: Any, hoisted: Any) -> Any:
            return self.forward(self._join(differentiable, fixed), hoisted, store=False)[0]

        def forward(differentiable: Any, fixed: Any, hoisted: Any) -> tuple[Any, Any]:
            inputs = self._join(first_order_only(differentiable), fixed)
            outputs, saved = self.forward(inputs, hoisted, store=True)
            return outputs, (inputs.params, inputs.shared, hoisted, saved)

        def backward(residuals: Any, cotangents: Any) -> tuple[Any, None, None]:
            carry, auxes, _ = cotangents  # the report has no floats, so its cotangents mean nothing
            return self.backward(residuals, first_order_only((carry, auxes))), None, None

        run.defvjp(forward, backward)
        return run(differentiable, fixed, hoisted)

    # -- forward

    def forward(self, inputs: Inputs, hoisted: list[Leaves], *, store: bool) -> tuple[Any, Any]:
        """Run all groups; with `store`, also save what backward needs."""
        scalar = jnp.zeros(self.shards.scalar_shape, jnp.int32)
        like = self._varies_like()
        pointer, wanted, used = (vary_as(scalar, *like) for _ in range(3))
        holds_any = any(not self.geometry.never_fits(g) for g in self.geometry.groups if g.tags)
        buffer = (
            self.shards.new_buffer(self.geometry, self.policy.fill, self.space, like)
            if store and holds_any
            else None
        )
        carry, auxes, saves, misses = inputs.carry, [], [], []
        state = (buffer, pointer, wanted, used)
        for program, group, params, held in zip(self.programs, self.geometry.groups, inputs.params, hoisted):
            (carry, state), (aux, saved, missed) = lax.scan(
                self._forward_step(program, group, inputs.shared, held, store=store), (carry, state), params
            )
            auxes.append(aux)
            saves.append(saved)
            if missed is not None:
                misses.append(missed)
        buffer, pointer, wanted, used = state
        report, missed_by_layer = self._agree(misses, wanted, used)
        if store and self.policy.on_overflow == "error":
            overflowed = raised_on(report, self.shards)
            report = report._replace(overflowed=overflowed)
            missed_by_layer = [missed * overflowed for missed in missed_by_layer]
        if store and self.policy.on_overflow != "recompute":
            carry = poisoned(report.overflowed, carry)
        return (carry, auxes, report), (saves, buffer, missed_by_layer)

    def _forward_step(
        self, program: LayerProgram, group: GroupGeometry, shared: Leaves, hoisted: Leaves, *, store: bool
    ) -> Callable[[Any, Leaves], Any]:
        def step(scanned: Any, params: Leaves) -> Any:
            carry, (buffer, pointer, wanted, used) = scanned
            new_carry, aux, stashed, kept = program.run(params, carry, shared, hoisted)
            placement = missed = None
            if group.tags:
                rows = jax.tree.map(self._one_a_shard, program.rows(aux))
                placement, pointer = place(self.geometry, group, pointer, rows)
                count = placement.end - placement.start
                wanted, used = wanted + count, used + count * placement.fits
                missed = 1 - placement.fits
                if store and not self.geometry.never_fits(group):
                    buffer = self.shards.map(
                        lambda at, arrays: push(self.geometry, group, arrays[0], at, arrays[1], self.space),
                        placement,
                        (buffer, stashed),
                    )
            needed = [leaf for leaf, used_here in zip(carry, program.carry_used) if used_here]
            saved = Saved(needed, kept, placement) if store else None
            return (new_carry, (buffer, pointer, wanted, used)), (aux, saved, missed)

        return step

    def _agree(
        self, misses: list[jax.Array], wanted: jax.Array, used: jax.Array
    ) -> tuple[StashReport, list[jax.Array]]:
        """One reduction over the mesh: which layers had no room on some shard, and the hottest shard's rows."""
        by_layer = [jnp.moveaxis(missed, 0, -1) for missed in misses]
        everything = jnp.concatenate([*by_layer, wanted[..., None], used[..., None]], axis=-1)
        agreed = self.shards.largest(everything)
        flags, at = [], 0
        for missed in misses:
            flags.append(agreed[at : at + missed.shape[0]])
            at += missed.shape[0]
        missed_layers = sum((jnp.sum(flag) for flag in flags), jnp.int32(0))
        report = StashReport(
            rows_wanted=agreed[-2],
            rows_used=agreed[-1],
            rows_capacity=jnp.int32(self.geometry.rows),
            layers_recomputed=missed_layers if self.policy.on_overflow == "recompute" else jnp.int32(0),
            overflowed=missed_layers > 0,
        )
        return report, flags

    # -- backward

    def backward(self, residuals: Any, cotangents: Any) -> Any:
        """Run all groups in reverse; the cotangents of the differentiated inputs."""
        all_params, shared, all_hoisted, (saves, buffer, flags) = residuals
        carry_cotangent, aux_cotangents = cotangents
        overflowed = sum((jnp.sum(flag) for flag in flags), jnp.int32(0)) > 0
        poison = overflowed if self.policy.on_overflow != "recompute" else None
        flag_of_group = iter(flags)

        split = self.programs[0].shared
        first = self.programs[0].carry
        g_carry = first.take(carry_cotangent)[0]
        if poison is not None:
            g_carry = poisoned(poison, g_carry)  # also at the start: under `error`, nothing may run before it
        shared_diff = split.take(shared)[0]
        g_shared = [vary_as(jnp.zeros_like(leaf), leaf) for leaf in shared_diff]
        g_params: list[Leaves] = []
        missed_of_group = [next(flag_of_group) if group.tags else None for group in self.geometry.groups]
        everything = list(
            zip(
                self.programs,
                self.geometry.groups,
                all_params,
                all_hoisted,
                saves,
                aux_cotangents,
                missed_of_group,
            )
        )
        for program, group, params, hoisted, saved, g_aux, missed in reversed(everything):
            step = self._backward_step(program, group, shared, hoisted, buffer, poison)
            scanned = (params, saved, program.aux.take(g_aux)[0], missed)
            (g_carry, g_shared), g_group = lax.scan(step, (g_carry, g_shared), scanned, reverse=True)
            g_params.append(g_group)
        if poison is not None:
            g_carry, g_shared = poisoned(poison, g_carry), poisoned(poison, g_shared)
        return g_params[::-1], g_carry, g_shared

    def _backward_step(
        self,
        program: LayerProgram,
        group: GroupGeometry,
        shared: Leaves,
        hoisted: Leaves,
        buffer: jax.Array | None,
        poison: jax.Array | None,
    ) -> Callable[[Any, Any], Any]:
        def step(state: Any, scanned: Any) -> Any:
            g_carry, g_shared = state
            params, saved, g_aux, missed = scanned
            kept_carry = iter(saved.carry)
            # A carry leaf that no operation reads is not saved; its value is not needed.
            carry = [
                next(kept_carry) if used else _zeros(aval)
                for used, aval in zip(program.carry_used, self._carry_avals(program))
            ]
            inputs = [*params, *carry, *shared, *hoisted]

            def backward_with(stashed: Leaves) -> Any:
                return program.backward(inputs, stashed, saved.kept, g_carry, g_aux)

            def from_buffer() -> Any:
                return backward_with(self._take_back(program, group, saved.placement, buffer))

            def recomputed() -> Any:
                # In a separate branch, or XLA would share what the two passes have in common and hold it all the
                # while (16 layers on a CPU: 31 MiB instead of 25). Barriers do not help: XLA drops them here.
                stashed = lax.cond(
                    missed != 0,
                    lambda: program.run(params, carry, shared, hoisted)[2],
                    lambda: [_zeros(aval) for aval in program.stashed_avals],
                )
                return backward_with(stashed)

            # A branch contains the layer's whole backward, not only `pop`: what leaves a branch is first written at
            # full size (H200, 16 layers: 4.0 ms of a step of 152), what stays inside is read in place.
            if self._may_recompute(group):
                g_params, g_carry, more = lax.cond(missed == 0, from_buffer, recomputed)
            else:
                g_params, g_carry, more = from_buffer()
            if poison is not None:
                g_params = poisoned(poison, g_params)
            return (g_carry, [a + b for a, b in zip(g_shared, more)]), g_params

        return step

    def _may_recompute(self, group: GroupGeometry) -> bool:
        return bool(group.tags) and self.policy.on_overflow == "recompute" and not self.geometry.always_fits

    def _take_back(
        self,
        program: LayerProgram,
        group: GroupGeometry,
        placement: Placement | None,
        buffer: jax.Array | None,
    ) -> Leaves:
        if not group.tags:
            return []
        if buffer is None or self.geometry.never_fits(group):  # only a layer without rows was not missed
            return [_zeros(aval) for aval in program.stashed_avals]
        return self.shards.map(
            lambda at, arrays: pop(self.geometry, group, arrays[0], at, self.space), placement, (buffer,)
        )

    # -- helpers

    def _split(self, inputs: Inputs) -> tuple[Any, Any]:
        params = [program.params.take(leaves) for program, leaves in zip(self.programs, inputs.params)]
        carry = self.programs[0].carry.take(inputs.carry)
        shared = self.programs[0].shared.take(inputs.shared)
        return tuple(([p[side] for p in params], carry[side], shared[side]) for side in (0, 1))  # type: ignore[return-value]

    def _join(self, differentiable: Any, fixed: Any) -> Inputs:
        params = [
            program.params.join(yes, no)
            for program, yes, no in zip(self.programs, differentiable[0], fixed[0])
        ]
        carry = self.programs[0].carry.join(differentiable[1], fixed[1])
        return Inputs(params, carry, self.programs[0].shared.join(differentiable[2], fixed[2]))

    def _carry_avals(self, program: LayerProgram) -> list[Any]:
        start = len(program.params.differentiable)
        return list(program.forward.in_avals[start : start + len(program.carry.differentiable)])

    def _varies_like(self) -> list[Any]:
        """Avals of the values that go into the buffer, for `shard_map(check_vma=True)`."""
        like: list[Any] = []
        for program in self.programs:
            if program.tags:
                like += [*program.rows_avals, *program.stashed_avals]
        everywhere = frozenset().union(*map(varying_axes, like))
        for program in self.programs:
            for tag, aval in zip(program.tags, program.stashed_avals):
                if varying_axes(aval) != everywhere:
                    raise ValueError(
                        f"tag {tag.name!r} varies over the mesh axes {sorted(varying_axes(aval))}, but other "
                        f"values in the buffer vary over {sorted(everywhere)}; mark it with jax.lax.pcast, "
                        "or use shard_map(check_vma=False)"
                    )
        return like

    def _one_a_shard(self, value: jax.Array) -> jax.Array:
        if value.size == self.shards.count:
            return value.reshape(self.shards.scalar_shape)
        if self.shards.count == 1:
            raise ValueError(
                f"a layer returns Rows of shape {value.shape}, one entry per shard, but stash_scan was given no "
                "mesh; pass mesh=… (and axes=…), or return scalars"
            )
        raise ValueError(
            f"a layer returns Rows of shape {value.shape}, but its tags are split over {self.shards.count} shards; "
            "return one entry per shard, split over the same axes"
        )


def _zeros(aval: Any) -> jax.Array:
    return vary_as(jnp.zeros(aval.shape, aval.dtype), aval)
