"""The routed experts as one autograd node: tokens into expert order, through both projections, and back.

    x_TD -permute-> x_RD -up-> h_RH -gated activation-> a_RN -down-> y_RD -combine-> y_TD

T tokens of K choices, R rows of capacity in expert order, E experts here, D the model's width, N an expert's, and
H = 2N (N without a gate). `up_EHD` and `down_EDN` are the projections; `a_RN` has the routing weights in it.
`ends_E` says where each expert's rows end.

Saved for backward, besides indices, in bf16 and for V valid rows:

| | the rows | the first projection |
| --- | --- | --- |
| tokens of this rank | `x_TD`, permuted again: 2·T·D | `h_RH`: 4·R·N, in pages 4·V·N |
| slots off the wire | `x_RD`: 2·R·D, in pages 2·V·D | the same |

**Two buffers.** For slots off the wire, R is what may arrive at worst, several times what does. The first S rows,
those that usually arrive (`expected_rows`), are the *expected* ones: buffers of just that size, which stay until
backward, or leave for the host by a rule's `fraction`. The R - S rows in *excess* have buffers that live for one
layer, and their valid rows go to pages. So bytes are copied only for rows beyond what was expected, and what stays
is ordinary memory, which other tensors get when a layer's backward is over. Without a number to expect, S = 0: all
rows are in one buffer, and nothing is cut.

The rows stand in one order all the same, and products over all of them are single ones. Only those that read the
two buffers are in two: `h_RH`, the gradient of `x_RD`, and that of `up_EHD`, to which the excess is added. That
sum has another order than without expected rows: its bits do not depend on pages, but they do on `expected_rows`.

**Pages.** How each tensor waits is a `Saving`. `h_RH` goes to pages from inside the activation kernel. It is
expendable: where the pool has no pages, backward recomputes it by a product whose ends are zero unless the pages
are missing. Under recompute the same product makes all of it. Rows off the wire cannot be recomputed: their pages
are required.

**Eight bits.** Under rules with `bits=8` codes wait in the place of rows and projection: see `coded.py`.

**Weights.** Those that require no gradient get none, and the tokens are saved only if backward asks for them.
Low-rank updates (LoRA), whose factors are [E, K, I] and [E, O, K] for a rank K, save nothing more: see
`projection.py`.
"""

from typing import Any, NamedTuple

import torch

from pagestash.kernels.backward import differentiable_once
from pagestash.kernels.moe import gated
from pagestash.kernels.moe.activations import as_activation
from pagestash.kernels.moe.combine import combine
from pagestash.kernels.moe.ends import cut_ends
from pagestash.kernels.moe.grouped import grouped_mm
from pagestash.kernels.moe.permute import permute, permute_split
from pagestash.kernels.moe.route import Routing
from pagestash.kernels.moe.row_codes import CodeRow
from pagestash.kernels.moe.row_info import RowInfo
from pagestash.moe.bias import bias_gradient, down_bias_gradient, weights_gradient_of_bias
from pagestash.moe.coded import BlockSaved, codes_of, forward_coded, source_of_codes
from pagestash.moe.lease import Lease, pages_of
from pagestash.moe.projection import LowRank, Projection, Read, Weight
from pagestash.moe.saving import BlockOptions
from pagestash.moe.two_buffers import (
    Cut,
    ExcessSource,
    Pair,
    RowSource,
    of_rows,
    recompute_missing,
    sum_update_gradients,
    up_gradient,
)
from pagestash.saved.fused import claim, fused
from pagestash.saved.received_rows import Ending
from pagestash.saved.region import frames
from pagestash.torch_internals import keeps_graph

OF_WEIGHTS = ("up", "down", "up_bias", "down_bias", "up_a", "up_b", "down_a", "down_b")
"""The inputs that are weights: a pipeline schedule may ask for their gradients in a half of its own."""


class Form(NamedTuple):
    """What a projection needs besides its tensors."""

    scale: float
    read: Read | None

    def weight(self, stored: torch.Tensor, a_EKI: torch.Tensor | None, b_EOK: torch.Tensor | None) -> Weight:
        update = None if a_EKI is None or b_EOK is None else LowRank(a_EKI, b_EOK, self.scale)
        return Weight(stored, None, update, self.read)


class Call(NamedTuple):
    """What a call of the block needs besides the tensors that may require a gradient."""

    ids_TK: torch.Tensor | None
    routing: Routing
    expected_ends_E: torch.Tensor | None
    excess_ends_E: torch.Tensor | None
    cut: Cut
    options: BlockOptions
    forms: tuple[Form, Form]


def routed_experts(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    up: Weight,
    down: Weight,
    ids_TK: torch.Tensor | None,
    routing: Routing,
    options: BlockOptions,
    *,
    received: bool = False,
    expected_rows: int = 0,
) -> torch.Tensor:
    """Tokens [T, D] through their experts, summed by token; or, if `received`, slots off the wire by slot.

    `weights_TK` and `ids_TK` belong to the choices; the ids count from this rank's first expert, and are read for
    the sake of `down`'s bias alone. `expected_rows` is for received rows.
    """
    # The kernels read both by choice, one after the other.
    weights_TK = weights_TK.contiguous()
    ids_TK = None if ids_TK is None or down.bias_EO is None else ids_TK.contiguous()
    capacity = routing.order.numel()
    expected = min(max(expected_rows, 0), capacity) if received else 0
    log = options.counted.log_on(x_TD.device) if options.counted and options.needs_backward else None
    expected_ends, excess_ends = None, None
    if expected or log is not None:
        expected_ends, excess_ends = cut_ends(routing.offsets, expected, log=log)
    if not expected:
        expected_ends, excess_ends = None, None
    cut = Cut(expected, capacity - expected, received)
    up_a, up_b, up_scale = up.update or (None, None, 1.0)
    down_a, down_b, down_scale = down.update or (None, None, 1.0)
    forms = Form(up_scale, up.read), Form(down_scale, down.read)
    call = Call(ids_TK, routing, expected_ends, excess_ends, cut, options, forms)
    with fused(*up.tensors(), *down.tensors()):
        return RoutedExperts.apply(
            x_TD,
            weights_TK,
            up.stored,
            down.stored,
            up.bias_EO,
            down.bias_EO,
            up_a,
            up_b,
            down_a,
            down_b,
            call,
        )


class RoutedExperts(torch.autograd.Function):
    """See `routed_experts`, and the top of the file for what it saves."""

    inputs = (
        "x", "weights", "up", "down", "up_bias", "down_bias", "up_a", "up_b", "down_a", "down_b", "call",
    )  # fmt: skip

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        up_stored: torch.Tensor,
        down_stored: torch.Tensor,
        up_bias_EH: torch.Tensor | None,
        down_bias_ED: torch.Tensor | None,
        up_a_EKD: torch.Tensor | None,
        up_b_EHK: torch.Tensor | None,
        down_a_EKN: torch.Tensor | None,
        down_b_EDK: torch.Tensor | None,
        call: Call,
    ) -> torch.Tensor:
        ids_TK, routing, expected_ends_E, excess_ends_E, cut, options, forms = call
        up = Projection.of(forms[0].weight(up_stored, up_a_EKD, up_b_EHK), x_TD)
        down = Projection.of(forms[1].weight(down_stored, down_a_EKN, down_b_EDK), x_TD)
        up_bias, down_bias = in_dtype_of(x_TD, up_bias_EH, down_bias_ED)
        h_columns, inverse_TK = up.weight_EOI.shape[1], routing.inverse
        options = options.by_rules(x_TD, routing.order.numel(), h_columns, received=cut.received)
        excess_rows = routing.rows if excess_ends_E is None else excess_ends_E[-1:]
        info = RowInfo(routing.rows, weights_TK, routing.order, up_bias, routing.offsets, options.interleaved)
        saves_rows = _asks_for_rows(ctx, options)
        if options.coded:
            a_RN, waiting = forward_coded(
                x_TD, inverse_TK, up, info, cut, excess_rows, options, saves_x=saves_rows
            )
        else:
            ends = Pair(expected_ends_E, routing.offsets if excess_ends_E is None else excess_ends_E)
            a_columns = down.weight_EOI.shape[2]
            a_RN, waiting = _forward_exact(
                x_TD, inverse_TK, up, a_columns, info, cut, ends, excess_rows, options
            )
        x, x_lease, h, h_lease = waiting
        y_RD = down.forward(a_RN, routing.offsets)
        del a_RN
        y_TD = combine(
            y_RD,
            inverse_TK,
            bias_ED=down_bias,
            bias_ids_TK=ids_TK,
            bias_weights_TK=weights_TK if down_bias is not None else None,
        )
        tokens_TD = x_TD if not cut.received and saves_rows else None
        if frames():
            _claim(tokens_TD, x, h, routing.order, excess_rows, cut, options)
        ctx.save_for_backward(
            tokens_TD, weights_TK, up_stored, down_stored, up_bias_EH, down_bias_ED, up_a_EKD, up_b_EHK,
            down_a_EKN, down_b_EDK, ids_TK, routing.offsets, routing.order, inverse_TK, expected_ends_E,
            excess_ends_E, x.expected, x.excess, h.expected, h.excess,
        )  # fmt: skip
        ctx.leases, ctx.cut, ctx.options, ctx.forms = (x_lease, h_lease), cut, options, forms
        ctx.inputs = RoutedExperts.inputs
        ctx.ending = _record(ctx, options, x_TD, h_columns, up_stored, down_stored)
        return y_TD

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (
            tokens_TD, weights_TK, up_stored, down_stored, up_bias, down_bias, up_a, up_b, down_a, down_b, ids_TK,
            offsets, order, inverse_TK, expected_ends_E, excess_ends_E, x_expected, x_excess, h_expected, h_excess,
        ) = ctx.saved_tensors  # fmt: skip
        # What is done with goes at once, not when this node ends; with `retain_graph` it stays.
        ctx.maybe_clear_saved_tensors()
        (x_lease, h_lease), cut, comes_again = ctx.leases, ctx.cut, keeps_graph()
        dy_TD = dy_TD.contiguous()
        up_weight = ctx.forms[0].weight(up_stored, up_a, up_b)
        down_weight = ctx.forms[1].weight(down_stored, down_a, down_b)
        up, down = Projection.of(up_weight, dy_TD), Projection.of(down_weight, dy_TD)
        up_bias, down_bias = in_dtype_of(dy_TD, up_bias, down_bias)
        info = RowInfo(offsets[-1:], weights_TK, order, up_bias, offsets, ctx.options.interleaved)
        ends = Pair(expected_ends_E, offsets if excess_ends_E is None else excess_ends_E)
        x, h = Pair(x_expected, x_excess), Pair(h_expected, h_excess)
        del x_expected, x_excess, h_expected, h_excess
        source: RowSource
        # Unless backward will want it again, the gradient of `h` takes the place of `h`.
        in_place = not comes_again or (h.expected is None and h.excess is None)
        if ctx.options.coded:
            source, x = source_of_codes(x, x_lease, offsets[-1:], tokens_TD, inverse_TK, cut, dy_TD)
            ends = Pair(None, offsets)
        else:
            source = exact = ExcessSource(tokens_TD, inverse_TK, x_lease, cut, dy_TD)
            recompute_missing(h, x, exact, up, ends, h_lease)
        dy_RD = permute(dy_TD, inverse_TK, order.numel())
        dinner_RK = down.inner_gradient(dy_RD, offsets)
        da_RN = down.input_gradient(dy_RD, dinner_RK, offsets)
        dh, a_RN, dweights_TK = _activation_gradient(h, da_RN, info, ctx.options, h_lease, in_place=in_place)
        del h, da_RN
        if h_lease is not None and not comes_again:
            h_lease.close()
        ddown = grouped_mm(dy_RD.t(), a_RN, offsets) if needs(ctx, "down") else None
        ddown_a, ddown_b = None, None
        if dinner_RK is not None and (needs(ctx, "down_a") or needs(ctx, "down_b")):
            ddown_a, ddown_b = down.update_gradients(down_weight.update, a_RN, dy_RD, dinner_RK, offsets)
        del a_RN, dinner_RK, down
        ddown_bias = None
        if down_bias is not None:
            assert dweights_TK is not None
            dweights_TK = dweights_TK + weights_gradient_of_bias(dy_TD, down_bias, ids_TK, inverse_TK)
            if needs(ctx, "down_bias"):
                ddown_bias = down_bias_gradient(dy_TD, dy_RD, weights_TK, inverse_TK, offsets)
        del dy_RD
        dup_bias = bias_gradient(dh.joined(), offsets) if needs(ctx, "up_bias") else None
        dup = up_gradient(dh, x, source, ends) if needs(ctx, "up") else None
        dinner = Pair(
            of_rows(up.inner_gradient, dh.expected, ends.expected),
            of_rows(up.inner_gradient, dh.excess, ends.excess),
        )
        dup_a, dup_b = None, None
        if up_weight.update is not None and (needs(ctx, "up_a") or needs(ctx, "up_b")):
            dup_a, dup_b = sum_update_gradients(up, up_weight.update, dh, dinner, x, source, ends)
        del x, source
        if x_lease is not None and not comes_again:
            x_lease.close()
        dx_TD = None
        if needs(ctx, "x"):
            dx_expected = of_rows(up.input_gradient, dh.take_expected(), dinner.expected, ends.expected)
            dx_excess = of_rows(up.input_gradient, dh.excess, dinner.excess, ends.excess)
            dx_TD = combine(dx_excess, inverse_TK, expected_SD=dx_expected)
        if dweights_TK is not None and ctx.needs_input_grad[1]:
            dweights_TK = dweights_TK.to(weights_TK.dtype)
        if ctx.ending is not None and not comes_again:
            ctx.ending.tell()
        return dx_TD, dweights_TK, dup, ddown, dup_bias, ddown_bias, dup_a, dup_b, ddown_a, ddown_b, None


def _forward_exact(
    x_TD: torch.Tensor,
    inverse_TK: torch.Tensor,
    up: Projection,
    a_columns: int,
    info: RowInfo,
    cut: Cut,
    ends: Pair,
    excess_rows: torch.Tensor,
    options: BlockOptions,
) -> tuple[torch.Tensor, BlockSaved]:
    """`a_RN`, and what waits for backward, in two buffers each."""
    capacity, h_columns = cut.expected + cut.excess, up.weight_EOI.shape[1]
    to_pages = options.needs_backward and cut.excess > 0
    x_lease, x_excess_RD, h_room, a_room = None, None, None, None
    if cut.received:
        if to_pages:
            x_lease = options.x.lease((cut.excess, x_TD.shape[1]), x_TD.dtype, excess_rows)
        if x_lease is not None:
            # As large as `y_RD` will be, and let go after `a_RN` has its memory: one block then serves both.
            x_excess_RD = x_TD.new_empty(capacity, x_TD.shape[1])[: cut.excess]
        # The blocks of what lives for this layer, before those of what stays, which would be cut out of them.
        h_room = x_TD.new_empty(cut.excess, h_columns)
        a_room = x_TD.new_empty(capacity, a_columns)
    x = Pair(
        *permute_split(
            x_TD, inverse_TK, cut.expected, capacity, excess_RD=x_excess_RD, pages=pages_of(x_lease)
        )
    )
    del x_excess_RD
    h = Pair(of_rows(up.forward, x.expected, ends.expected), None)
    del h_room
    h.excess = of_rows(up.forward, x.excess, ends.excess)
    if not cut.received:
        x = Pair(None, None)  # backward permutes them again
    h_lease = None
    if to_pages:
        h_lease = options.h.lease((cut.excess, h_columns), x_TD.dtype, excess_rows, expendable=True)
    del a_room
    a_RN = gated.forward(h.excess, info, options.activation, pages_of(h_lease), expected_SH=h.expected)
    # What is not saved is dropped here. What the pool had no page for is left to autograd, as without a pool.
    if options.x.pool is not None and not (to_pages and x_lease is None):
        x.excess = None
    if options.h.pool is not None or options.h.recompute:
        h.excess = None
    if options.h.recompute:
        h.expected = None
    return a_RN, BlockSaved(x, x_lease, h, h_lease)


def _claim(
    tokens_TD: torch.Tensor | None,
    x: Pair,
    h: Pair,
    order: torch.Tensor,
    excess_rows: torch.Tensor,
    cut: Cut,
    options: BlockOptions,
) -> None:
    """Tell a keeper whose the tensors are that autograd saves next, and how many of their rows are valid.

    The expected rows have a known size: a keeper may hand them to the copy engine when the region ends. That is
    safe because forward has launched all that writes them, and the copy waits for the compute stream; and because
    nobody writes them until backward. There, `dh` goes over `h` in what the keeper gives back: memory that the copy
    back has filled and the compute stream has waited for, or, of rows that never left, the buffer itself.
    """
    options.x.save(tokens_TD)
    for saving, rows in ((options.x, x), (options.h, h)):
        saving.save(rows.expected, sized=True)
        saving.save(rows.excess, rows=excess_rows, capacity=cut.excess)
    if cut.expected:
        claim(None, order, sized=True)
    else:
        claim(None, order, rows=excess_rows, capacity=cut.excess)


def _record(
    ctx: Any,
    options: BlockOptions,
    x_TD: torch.Tensor,
    h_columns: int,
    up_stored: torch.Tensor,
    down_stored: torch.Tensor,
) -> Ending | None:
    """Tell a keeper that asks what waits for each received row, until the backward of this forward."""
    recording = None if options.counted is None else options.counted.recording
    if recording is None or options.counted is None or not options.needs_backward:
        return None
    sizes = x_TD.shape[1] * x_TD.itemsize, h_columns * x_TD.itemsize
    if options.coded:
        parts = as_activation(options.activation).parts
        sizes = CodeRow(1, x_TD.shape[1]).bytes, CodeRow(parts, h_columns // parts).bytes
    x_rule = options.x.stash_rule()
    if options.coded and not _asks_for_rows(ctx, options):
        x_rule = None  # (a block that does not code keeps received rows in any case)
    ruled = zip((x_rule, options.h.stash_rule()), sizes)
    rows = [(size, rule.for_expected_rows()) for rule, size in ruled if rule is not None]
    head_bytes = sum(size * (1 - (0 if leaves is None else leaves.fraction)) for size, leaves in rows)
    gradients = (("up", up_stored), ("down", down_stored))
    left = sum(w.nbytes for name, w in gradients if ctx.needs_input_grad[RoutedExperts.inputs.index(name)])
    return recording.begin(options.counted, tuple(size for size, _ in rows), round(head_bytes), left)


def _activation_gradient(
    h: Pair,
    da_RN: torch.Tensor,
    info: RowInfo,
    options: BlockOptions,
    lease: Lease | None,
    *,
    in_place: bool,
) -> tuple[Pair, torch.Tensor, torch.Tensor | None]:
    """The gradients of `h` and of the weights, and the activation once more; `in_place` over `h` and `da_RN`."""
    if options.coded:
        parts = as_activation(options.activation).parts
        codes = codes_of(CodeRow(parts, da_RN.shape[1]), h, lease)
        dh_RH, a_RN, dweights_TK = gated.backward_of_codes(codes, da_RN, info, options.activation)
        return Pair(None, dh_RH), a_RN, dweights_TK
    assert h.excess is not None
    dh = Pair(h.expected, None)
    if h.expected is not None and not in_place:
        dh.expected = torch.empty_like(h.expected)
    dh.excess, a_RN, dweights_TK = gated.backward(
        h.excess,
        da_RN,
        info,
        options.activation,
        pages_of(lease),
        expected_SH=h.expected,
        dexpected_SH=dh.expected,
        in_place=in_place,
    )
    return dh, a_RN, dweights_TK


def _asks_for_rows(ctx: Any, options: BlockOptions) -> bool:
    """Whether backward may ask for the input of the first projection.

    By what was asked for alone, not by what the pool granted: a recomputed forward must save the same tensors.
    """
    wanted = (ctx.needs_input_grad[RoutedExperts.inputs.index(name)] for name in ("up", "up_a", "up_b"))
    return (options.h.pool is not None and not options.coded) or options.h.recompute or any(wanted)


def in_dtype_of(like: torch.Tensor, *weights: torch.Tensor | None) -> tuple[Any, ...]:
    """Weights in the activations' dtype.

    Cast here, and again in backward, rather than by the caller: what autograd keeps is then the parameter
    itself, and not a copy of it that lives until backward.
    """
    return tuple(None if weight is None else weight.to(like.dtype) for weight in weights)


def needs(ctx: Any, name: str) -> bool:
    """Whether the running backward is to compute the gradient of the input `name`."""
    half = ctx.options.half
    if half is not None and not (half.weights if name in OF_WEIGHTS else half.inputs):
        return False
    return ctx.needs_input_grad[ctx.inputs.index(name)]
