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
zero unless the pages are missing. Under recompute the same product makes all of it. Under a rule with `bits=8`
codes wait in its place, which the activation's kernel writes and reads.

**Weights.** Those that require no gradient get none, and the tokens are saved only if backward asks for them.
Low-rank updates (LoRA) save nothing more: see `projection.py`.
"""

from typing import Any, NamedTuple

import torch

from pagestash.kernels.backward import differentiable_once
from pagestash.kernels.gemm.rows import TokenRows
from pagestash.kernels.moe import gated
from pagestash.kernels.moe.activation import as_activation
from pagestash.kernels.moe.combine import combine
from pagestash.kernels.moe.ends import missing_bounds
from pagestash.kernels.moe.route import Routing
from pagestash.kernels.moe.row_codes import CodeRow, RowCodes
from pagestash.kernels.moe.row_info import RowInfo
from pagestash.moe.bias import bias_gradient, down_bias_gradient, weights_gradient_of_bias
from pagestash.moe.lease import Lease, pages_of
from pagestash.moe.projection import Form, Projection, Weight, in_dtype_of
from pagestash.moe.saving import BlockOptions, needs
from pagestash.saved.fused import claim, fused
from pagestash.saved.region import frames
from pagestash.torch_internals import keeps_graph


class Call(NamedTuple):
    """What a call needs besides the tensors that may require a gradient."""

    ids_TK: torch.Tensor | None
    routing: Routing
    options: BlockOptions
    forms: tuple[Form, Form]


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
    # The kernels read both by choice, one after the other; the ids for the sake of `down`'s bias alone.
    weights_TK = weights_TK.contiguous()
    ids = None if down.bias_EO is None else ids_TK.contiguous()
    call = Call(ids, routing, options, (up.form(), down.form()))
    with fused(*up.tensors(), *down.tensors()):
        return LocalExperts.apply(x_TD, weights_TK, *up.tensors(), *down.tensors(), call)


class LocalExperts(torch.autograd.Function):
    """See `local_experts`, and the top of the file for what it saves."""

    inputs = (
        "x", "weights", "up", "up_bias", "up_a", "up_b", "down", "down_bias", "down_a", "down_b", "call",
    )  # fmt: skip

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        up_stored: torch.Tensor,
        up_bias_EH: torch.Tensor | None,
        up_a_EKD: torch.Tensor | None,
        up_b_EHK: torch.Tensor | None,
        down_stored: torch.Tensor,
        down_bias_ED: torch.Tensor | None,
        down_a_EKN: torch.Tensor | None,
        down_b_EDK: torch.Tensor | None,
        call: Call,
    ) -> torch.Tensor:
        ids_TK, routing, options, forms = call
        bounds, order, inverse_TK = routing.bounds, routing.order, routing.inverse
        ctx.inputs = LocalExperts.inputs
        up = Projection.of(forms[0].weight(up_stored, up_a_EKD, up_b_EHK), x_TD)
        down = Projection.of(forms[1].weight(down_stored, down_a_EKN, down_b_EDK), x_TD)
        up_bias, down_bias = in_dtype_of(x_TD, up_bias_EH, down_bias_ED)
        capacity, columns = order.numel(), up.weight_EOI.shape[1]
        options = options.by_rules(x_TD, capacity, columns, received=False)
        x = TokenRows(x_TD, inverse_TK, order)
        info = RowInfo(bounds[-1:], bias=up_bias, offsets=bounds[1:], interleaved=options.interleaved)
        both = up_gated(up, up_bias, x, bounds, options)
        lease, paired = None, both is not None
        if options.coded:
            h_RH, a_RN, lease = _coded(x, up, info, options, bounds)
        elif both is not None:
            h_RH, a_RN = both
            lease = _lease(options, h_RH, bounds[-1:])
            if lease is not None:
                lease.fill(h_RH)
        else:
            h_RH = up.forward(x, bounds)
            lease = _lease(options, h_RH, bounds[-1:])
            a_RN = gated.forward(h_RH, info, options.activation, pages_of(lease))
        del x, both
        saved_h = None if lease is not None or options.h.recompute else h_RH
        if options.h.pool is not None and not options.coded:
            saved_h = None  # in pages, or recomputed where there are none
        del h_RH
        y_RD = down.forward(a_RN, bounds)
        del a_RN
        y_TD = combine(
            y_RD,
            inverse_TK,
            weights_TK,
            bias_ED=down_bias,
            bias_ids_TK=ids_TK,
            bias_weights_TK=weights_TK if down_bias is not None else None,
        )
        tokens_TD = x_TD if asks_for_rows(ctx, options) else None
        if frames():
            options.x.save(tokens_TD)
            rows = bounds[-1:]  # one tensor: claims of the same rows move together
            options.h.save(saved_h, rows=rows, capacity=capacity)
            claim(None, order, rows=rows, capacity=capacity)
        ctx.save_for_backward(
            tokens_TD, weights_TK, up_stored, up_bias_EH, up_a_EKD, up_b_EHK, down_stored, down_bias_ED,
            down_a_EKN, down_b_EDK, ids_TK, bounds, order, inverse_TK, saved_h,
        )  # fmt: skip
        ctx.lease, ctx.paired, ctx.options, ctx.forms = lease, paired, options, forms
        return y_TD

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (
            tokens_TD, weights_TK, up_stored, up_bias_EH, up_a, up_b, down_stored, down_bias_ED, down_a, down_b,
            ids_TK, bounds, order, inverse_TK, h_RH,
        ) = ctx.saved_tensors  # fmt: skip
        # What is done with goes at once, not when this node ends; with `retain_graph` it stays.
        ctx.maybe_clear_saved_tensors()
        lease, paired, options, comes_again = ctx.lease, ctx.paired, ctx.options, keeps_graph()
        dy_TD = dy_TD.contiguous()
        up_weight = ctx.forms[0].weight(up_stored, up_a, up_b)
        down_weight = ctx.forms[1].weight(down_stored, down_a, down_b)
        up, down = Projection.of(up_weight, dy_TD), Projection.of(down_weight, dy_TD)
        up_bias, down_bias = in_dtype_of(dy_TD, up_bias_EH, down_bias_ED)
        info = RowInfo(bounds[-1:], weights_TK, order, up_bias, bounds[1:], options.interleaved or paired)
        dy = TokenRows(dy_TD, inverse_TK, order)
        x = None if tokens_TD is None else dy.of(tokens_TD)

        # Unless backward will want it again, the gradient of `h` takes the place of `h`.
        in_place = h_RH is None or not comes_again
        if h_RH is None and not options.coded:
            assert x is not None
            missing = bounds if lease is None else missing_bounds(bounds, lease.pages)
            both = up_gated(up, up_bias, x, missing, options)
            h_RH = up.forward(x, missing) if both is None else both[0]
            del both
        dinner_RK = down.inner_gradient(dy, bounds)
        da_RN = down.input_gradient(dy, dinner_RK, bounds)
        if options.coded:
            row = _code_row(options, da_RN.shape[1])
            codes = RowCodes(row, None, h_RH, pages_of(lease))
            dh_RH, a_RN, dweights_TK = gated.backward_of_codes(codes, da_RN, info, options.activation)
            del codes
        else:
            dh_RH, a_RN, dweights_TK = gated.backward(
                h_RH, da_RN, info, options.activation, pages_of(lease), in_place=in_place
            )
        del h_RH, da_RN
        if lease is not None and not comes_again:
            lease.close()
        assert dweights_TK is not None

        ddown = down.gradient(dy, a_RN, bounds) if needs(ctx, "down") else None
        ddown_a, ddown_b = None, None
        if dinner_RK is not None and (needs(ctx, "down_a") or needs(ctx, "down_b")):
            ddown_a, ddown_b = down.update_gradients(down_weight.update, a_RN, dy, dinner_RK, bounds)
        del a_RN, dinner_RK, down
        ddown_bias = None
        if down_bias is not None:
            dweights_TK = dweights_TK + weights_gradient_of_bias(dy_TD, down_bias, ids_TK, inverse_TK)
            if needs(ctx, "down_bias"):
                ddown_bias = down_bias_gradient(dy_TD, dy.permuted(), weights_TK, inverse_TK, bounds)
        del dy

        dup_bias = bias_gradient(dh_RH, bounds) if needs(ctx, "up_bias") else None
        dup = None
        if needs(ctx, "up"):
            assert x is not None
            dup = up.gradient(dh_RH, x, bounds, paired=paired)
        dinner_RK = up.inner_gradient(dh_RH, bounds)
        dup_a, dup_b = None, None
        if dinner_RK is not None and (needs(ctx, "up_a") or needs(ctx, "up_b")):
            assert x is not None
            dup_a, dup_b = up.update_gradients(up_weight.update, x, dh_RH, dinner_RK, bounds)
        del x
        dx_TD = None
        if needs(ctx, "x"):
            dx_RD = up.input_gradient(dh_RH, dinner_RK, bounds, paired=paired)
            del dh_RH
            dx_TD = combine(dx_RD, inverse_TK)
        dweights = dweights_TK.to(weights_TK.dtype) if ctx.needs_input_grad[1] else None
        return dx_TD, dweights, dup, dup_bias, dup_a, dup_b, ddown, ddown_bias, ddown_a, ddown_b, None


def up_gated(
    up: Projection, bias_EH: torch.Tensor | None, x: TokenRows, bounds: torch.Tensor, options: BlockOptions
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`h_RH` in pairs, and `a_RN`, from one kernel; None where no kernel makes both."""
    plain = up.a_EKI is None and bias_EH is None and not (options.interleaved or options.coded)
    if not plain or as_activation(options.activation) != as_activation("silu"):
        return None
    return up.products.up_gated(x, up.weight_EOI, bounds)


def _lease(options: BlockOptions, h_RH: torch.Tensor, rows: torch.Tensor) -> Lease | None:
    """Pages for the first projection, where a rule has it stashed."""
    if not (options.needs_backward and h_RH.shape[0]):
        return None
    return options.h.lease((h_RH.shape[0], h_RH.shape[1]), h_RH.dtype, rows, expendable=True)


def _coded(
    x: TokenRows, up: Projection, info: RowInfo, options: BlockOptions, bounds: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor, Lease | None]:
    """The codes of `h_RH`, None where they are in pages; `a_RN`; and those pages."""
    h_RH = up.forward(x, bounds)
    row = _code_row(options, h_RH.shape[1] // as_activation(options.activation).parts)
    # The block of what lives for this layer, before that of what stays, which would be cut out of it.
    a_room = h_RH.new_empty(h_RH.shape[0], row.width)
    codes, lease = options.h.codes(row, 0, h_RH.shape[0], bounds[-1:], h_RH.device)
    del a_room
    a_RN = gated.forward(h_RH, info, options.activation, codes=codes)
    return codes.excess_RC, a_RN, lease


def _code_row(options: BlockOptions, inner: int) -> CodeRow:
    return CodeRow(as_activation(options.activation).parts, inner)


def asks_for_rows(ctx: Any, options: BlockOptions) -> bool:
    """Whether backward may ask for the input of the first projection.

    By what was asked for alone, not by what the pool granted: a recomputed forward must save the same tensors.
    """
    wanted = (ctx.needs_input_grad[ctx.inputs.index(name)] for name in ("up", "up_a", "up_b"))
    return (options.h.pool is not None and not options.coded) or options.h.recompute or any(wanted)
