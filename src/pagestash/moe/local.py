"""The routed experts of this rank's tokens as one autograd node: into expert order, two projections, and back.

    x_TD -permute-> x_RD -up-> h_RH -gated activation-> a_RN -down-> y_RD -weigh, combine-> y_TD

T tokens of K choices, R rows of capacity in expert order, E experts, D the model's width, N an expert's, and H =
2N (N without a gate). `up_EHD` and `down_EDN` are the projections. `bounds` says where each expert's rows begin
and end.

| saved for backward, in bf16 | bytes |
| --- | --- |
| the tokens, of which backward makes the rows again | 2·T·D |
| `h_RH`, the first projection | 4·R·N; in pages 4·V·N for V valid rows |
| indices and routing weights | 12·R |

`h_RH` alone makes the gradient of itself, `a_RN` once more for the gradient of `down`, and that of the weights,
which `combine` multiplies with: neither `a_RN` nor `y_RD` waits.

**In one kernel.** Where a kernel for products gathers rows and gates in its epilogue (quack), `x_RD` never exists,
and `h_RH` has gate and linear part in pairs. Its `a_RN` is of sums that were not rounded, so that a step must go
one way whatever a policy says: what is to be in pages is copied there, and recomputed by the same kernel.

**Pages.** `h_RH` is expendable: where the pool has no pages, backward recomputes it by a product whose bounds are
zero unless the pages are missing. Under recompute the same product makes all of it. Under a rule with `bits=8` the
keeper codes it once it has been read.

**Weights.** Those that require no gradient get none, and the tokens are saved only if backward asks for them.
Low-rank updates (LoRA) save nothing more: see `projection.py`.
"""

from functools import partial
from typing import Any

import torch

from pagestash.kernels.backward import differentiable_once
from pagestash.kernels.gemm.rows import TokenRows
from pagestash.kernels.moe import gated
from pagestash.kernels.moe.activation import (
    SETTINGS,
    Activation,
    ActivationName,
    as_activation,
    as_settings,
    from_settings,
)
from pagestash.kernels.moe.combine import combine
from pagestash.kernels.moe.ends import missing_bounds
from pagestash.kernels.moe.route import Routing, route
from pagestash.kernels.moe.row_info import RowInfo
from pagestash.kernels.operator import operator
from pagestash.moe.bias import bias_gradient
from pagestash.moe.block import (
    INPUTS,
    Call,
    combined,
    down_bias_gradients,
    projections,
    weight_gradients,
)
from pagestash.moe.lease import Lease, pages_of
from pagestash.moe.projection import Form, Projection, Weight
from pagestash.moe.saving import OF_WEIGHTS, BlockOptions, asks_for_rows, needs
from pagestash.saved.fused import claim, fused
from pagestash.saved.region import frames
from pagestash.torch_internals import keeps_graph


def local_experts(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    up: Weight,
    down: Weight,
    ids_TK: torch.Tensor,
    routing: Routing,
    options: BlockOptions,
) -> torch.Tensor:
    """Tokens [T, D] through their experts, times the choices' weights, summed by token."""
    call, matrices = Call.of(up, down, ids_TK, routing, options), (*up.tensors(), *down.tensors())
    with fused(*matrices):
        return LocalExperts.apply(x_TD, weights_TK.contiguous(), *matrices, call)


class LocalExperts(torch.autograd.Function):
    """See `local_experts`, and the top of the file for what it saves."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, weights_TK: torch.Tensor, *given: Any) -> torch.Tensor:
        *matrices, call = given
        ids_TK, routing, options, forms = call
        bounds, order, inverse_TK = routing.bounds, routing.order, routing.inverse
        ctx.inputs = INPUTS
        up, down = projections(forms, matrices, x_TD)
        capacity, columns = order.numel(), up.weight_EOI.shape[1]
        options = options.by_rules(x_TD, capacity, columns, received=False)
        x = TokenRows(x_TD, inverse_TK, order)
        info = RowInfo(bounds[-1:], bias=up.bias_EO, offsets=bounds[1:], interleaved=options.interleaved)
        if _gates(up, capacity, options):
            h_RH, a_RN = up.products.up_gated(x, up.weight_EOI, bounds)
            lease = _lease(options, h_RH, bounds[-1:])
            if lease is not None:
                lease.fill(h_RH)
        else:
            h_RH = up.forward(x, bounds)
            lease = _lease(options, h_RH, bounds[-1:])
            a_RN = gated.forward(h_RH, info, options.activation, pages_of(lease))
        # (While `x_RD` has its block, which serves `y_RD`: what stays is not cut out of that.)
        put_away = options.h.put_away(h_RH, bounds[-1:]) if options.coded else None
        # Else it is recomputed, or in pages, and recomputed where there are none.
        saves_h = not (options.coded or options.h.recompute or options.h.pool is not None)
        saved_h = h_RH if saves_h else None
        del x, h_RH
        y_RD = down.forward(a_RN, bounds)
        del a_RN
        y_TD = combined(y_RD, weights_TK, down, call)
        tokens_TD = x_TD if asks_for_rows(ctx, options) else None
        if frames():
            options.x.save(tokens_TD)
            rows = bounds[-1:]  # one tensor: claims of the same rows move together
            options.h.save(saved_h, rows=rows, capacity=capacity)
            claim(None, order, rows=rows, capacity=capacity)
        ctx.save_for_backward(tokens_TD, weights_TK, *matrices, ids_TK, bounds, order, inverse_TK, saved_h)
        ctx.lease, ctx.put_away, ctx.options, ctx.forms = lease, put_away, options, forms
        return y_TD

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens_TD, weights_TK, *matrices, ids_TK, bounds, order, inverse_TK, h_RH = ctx.saved_tensors
        # What is done with goes at once, not when this node ends; with `retain_graph` it stays.
        ctx.maybe_clear_saved_tensors()
        lease, put_away, options, comes_again = ctx.lease, ctx.put_away, ctx.options, keeps_graph()
        if not comes_again:
            ctx.put_away = None
        dy_TD = dy_TD.contiguous()
        up, down = projections(ctx.forms, matrices, dy_TD)
        paired = _gates(up, order.numel(), options)
        info = RowInfo(bounds[-1:], weights_TK, order, up.bias_EO, bounds[1:], options.interleaved or paired)
        dy = TokenRows(dy_TD, inverse_TK, order)
        x = None if tokens_TD is None else dy.of(tokens_TD)

        # Unless backward will want it again, the gradient of `h` takes the place of `h`.
        in_place = h_RH is None or not (comes_again or options.functional)
        if h_RH is None and put_away is None:
            assert x is not None
            missing = bounds if lease is None else missing_bounds(bounds, lease.pages)
            if paired:
                h_RH, _ = up.products.up_gated(x, up.weight_EOI, missing)
            else:
                h_RH = up.forward(x, missing)
        dinner_RK = down.inner_gradient(dy, bounds)
        da_RN = down.input_gradient(dy, dinner_RK, bounds)
        if put_away is not None:
            h_RH, in_place = put_away.unpack(), not comes_again
        dh_RH, a_RN, dweights_TK = gated.backward(
            h_RH, da_RN, info, options.activation, pages_of(lease), in_place=in_place
        )
        del h_RH, da_RN, put_away
        if lease is not None and not comes_again:
            lease.close()
        assert dweights_TK is not None

        of_down = weight_gradients(ctx, "down", down, dy, a_RN, dinner_RK, bounds)
        del a_RN, dinner_RK
        dweights_TK, ddown_bias = down_bias_gradients(
            ctx, dweights_TK, down.bias_EO, dy_TD, dy, weights_TK, ids_TK, inverse_TK, bounds
        )
        del dy, down

        dup_bias = bias_gradient(dh_RH, bounds) if needs(ctx, "up_bias") else None
        dinner_RK = up.inner_gradient(dh_RH, bounds)
        of_up = weight_gradients(ctx, "up", up, dh_RH, x, dinner_RK, bounds, paired=paired)
        del x
        dx_TD = None
        if needs(ctx, "x"):
            dx_RD = up.input_gradient(dh_RH, dinner_RK, bounds, paired=paired)
            del dh_RH
            dx_TD = combine(dx_RD, inverse_TK)
        dweights = dweights_TK.to(weights_TK.dtype) if ctx.needs_input_grad[1] else None
        return dx_TD, dweights, of_up[0], dup_bias, *of_up[1:], of_down[0], ddown_bias, *of_down[1:], None


def _gates(up: Projection, rows: int, options: BlockOptions) -> bool:
    """Whether one kernel makes `h_RH`, in pairs, and `a_RN`."""
    plain = up.update is None and up.bias_EO is None and not options.interleaved
    silu = as_activation(options.activation) == as_activation("silu")
    return plain and silu and up.products.gates(rows, up.weight_EOI)


def _lease(options: BlockOptions, h_RH: torch.Tensor, rows: torch.Tensor) -> Lease | None:
    """Pages for the first projection, where a rule has it stashed."""
    if not (options.needs_backward and h_RH.shape[0]):
        return None
    return options.h.lease((h_RH.shape[0], h_RH.shape[1]), h_RH.dtype, rows, expendable=True)


# --- for compilers ---


class _Experts:
    """The routing and `LocalExperts`."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, weights_TK: torch.Tensor, *given: Any) -> torch.Tensor:
        *matrices, ids_TK, settings = given
        routing = route(ids_TK, matrices[0].shape[0])
        call = Call(ids_TK, routing, _options(settings), _forms(settings))
        return LocalExperts.forward(ctx, x_TD, weights_TK, *matrices, call)

    @staticmethod
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.inputs, ctx.lease, ctx.put_away = INPUTS, None, None
        ctx.options, ctx.forms = _options(ctx.settings), _forms(ctx.settings)
        return LocalExperts.backward(ctx, dy_TD)


def _options(settings: tuple[Any, ...]) -> BlockOptions:
    *activation, interleaved, _, _ = settings
    return BlockOptions(activation=from_settings(activation), interleaved=interleaved, functional=True)


def _forms(settings: tuple[Any, ...]) -> tuple[Form, Form]:
    *_, of_up, of_down = settings
    return Form(of_up), Form(of_down)


def _fake(x_TD: torch.Tensor, _: torch.Tensor, *given: Any) -> list[torch.Tensor]:
    up, ids_TK = given[0], given[len(OF_WEIGHTS)]
    experts, columns = up.shape[:2]
    rows, made = ids_TK.numel(), partial(ids_TK.new_empty, dtype=torch.int32)
    h_RH = x_TD.new_empty(rows, columns)
    return [x_TD.new_empty(x_TD.shape), made((experts + 1,)), made((rows,)), made(ids_TK.shape), h_RH]


_MATRICES = ", ".join(f"Tensor? {name}" if "_" in name else f"Tensor {name}" for name in OF_WEIGHTS)
_operator = operator(
    "experts",
    _Experts,
    f"Tensor x, Tensor weights, {_MATRICES}, Tensor ids, {SETTINGS}, bool interleaved, float of_up, float of_down",
    _fake,
    keeps=range(3 + len(OF_WEIGHTS)),
)


def traced_experts(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    up: Weight,
    down: Weight,
    ids_TK: torch.Tensor,
    activation: ActivationName | Activation,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Routing and `local_experts` as one operator."""
    tensors = x_TD, weights_TK.contiguous(), *up.tensors(), *down.tensors(), ids_TK
    settings = *as_settings(activation), interleaved, up.form().scale, down.form().scale
    return _operator(*tensors, *settings)[0]
