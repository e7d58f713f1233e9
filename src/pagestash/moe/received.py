"""The routed experts of slots that came off the wire, as one autograd node: into expert order, and back by slot.

    x_SD -permute-> x_RD -up-> h_RH -gated activation-> a_RN -down-> y_RD -weigh, combine-> y_SD

S slots of K choices, R rows of capacity, several times what arrives; the rest as in `local.py`, and so is what is
saved, but for the rows: slots do not outlive this layer, so that `x_RD` waits, 2·R·D bytes, or 2·V·D in pages.

**Two buffers.** The rows that usually arrive (`expected_rows`) are *expected*: their buffers have just that size
and stay until backward, or leave for the host by a rule's `fraction`. The rows in *excess* of them have buffers
that live for one layer, and their valid rows go to pages. So bytes are copied only for rows beyond what was
expected, and what stays is ordinary memory, which other tensors get when a layer's backward is over. Without a
number to expect, all rows are in excess.

The rows stand in one order all the same, and products over all of them are single ones. Only those that read the
two buffers are in two: `h_RH`, the gradient of `x_RD`, and that of `up`, to which the excess is added. That sum
has another order than without expected rows: its bits do not depend on pages, but they do on `expected_rows`.

**Pages.** `h_RH` is expendable, as in `local.py`. Rows off the wire cannot be recomputed: their pages are required.

**Eight bits.** Under rules with `bits=8` for both, `x_RD` and `h_RH` live for one layer, in one buffer each. The
keeper codes them, in two buffers, once the activation is there, and each comes back before the product that reads
it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pagestash.kernels.backward import differentiable_once
from pagestash.kernels.moe import gated
from pagestash.kernels.moe.combine import combine
from pagestash.kernels.moe.permute import permute, permute_split
from pagestash.kernels.moe.route import Routing
from pagestash.kernels.moe.row_info import RowInfo
from pagestash.kernels.pages.eight_bits import CodeShape
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
from pagestash.moe.projection import Projection, Weight
from pagestash.moe.saving import OF_WEIGHTS, BlockOptions, asked, asks_for_rows, needs
from pagestash.moe.two_buffers import (
    Cut,
    Pair,
    PutAway,
    activation_gradient,
    cut_at,
    of_rows,
    recompute_missing,
    restored,
    up_gradient,
    update_gradients,
)
from pagestash.saved.fused import claim, fused
from pagestash.saved.received_rows import Ending
from pagestash.saved.region import frames
from pagestash.torch_internals import keeps_graph


def received_experts(
    x_SD: torch.Tensor,
    weights_SK: torch.Tensor,
    up: Weight,
    down: Weight,
    ids_SK: torch.Tensor,
    routing: Routing,
    options: BlockOptions,
    *,
    expected_rows: int = 0,
) -> torch.Tensor:
    """Slots [S, D] through their experts, times the choices' weights, summed by slot."""
    call, matrices = Call.of(up, down, ids_SK, routing, options), (*up.tensors(), *down.tensors())
    cut = cut_at(routing, options, expected_rows)
    with fused(*matrices):
        return ReceivedExperts.apply(x_SD, weights_SK.contiguous(), *matrices, (call, cut))


class ReceivedExperts(torch.autograd.Function):
    """See `received_experts`, and the top of the file for what it saves."""

    @staticmethod
    def forward(ctx: Any, x_SD: torch.Tensor, weights_SK: torch.Tensor, *given: Any) -> torch.Tensor:
        *matrices, (call, cut) = given
        ids_SK, routing, options, forms = call
        bounds, order, inverse_SK = routing.bounds, routing.order, routing.inverse
        ctx.inputs = INPUTS
        up, down = projections(forms, matrices, x_SD)
        columns = up.weight_EOI.shape[1]
        fewest = min(filter(None, cut[:2]), default=0)
        options = options.by_rules(x_SD, fewest, columns, received=True)
        info = RowInfo(bounds[-1:], bias=up.bias_EO, offsets=bounds[1:], interleaved=options.interleaved)
        if options.coded:
            saves_x = asks_for_rows(ctx, options)
            a_RN, x_away, h_away = _forward_coded(
                x_SD, inverse_SK, up, info, bounds, cut, options, saves_x=saves_x
            )
            saved = Saved(Pair(), None, Pair(), None)
        else:
            x_away = h_away = None
            a_RN, saved = _forward_exact(x_SD, inverse_SK, up, down.weight_EOI.shape[2], info, cut, options)
        x, x_lease, h, h_lease = saved
        y_RD = down.forward(a_RN, bounds)
        del a_RN
        y_SD = combined(y_RD, weights_SK, down, call)
        if frames():
            _claim(x, h, order, cut, options)
        ctx.save_for_backward(
            weights_SK, *matrices, ids_SK, bounds, order, inverse_SK, cut.expected_bounds,
            cut.excess_bounds if cut.expected else None, x.expected, x.excess, h.expected, h.excess,
        )  # fmt: skip
        ctx.leases, ctx.put_away = (x_lease, h_lease), (x_away, h_away)
        ctx.sizes, ctx.options, ctx.forms = cut[:2], options, forms
        ctx.ending = _record(ctx, options, x_SD, columns, matrices)
        return y_SD

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_SD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (
            weights_SK, *matrices, ids_SK, bounds, order, inverse_SK, expected_bounds, excess_bounds,
            x_expected, x_excess, h_expected, h_excess,
        ) = ctx.saved_tensors  # fmt: skip
        # What is done with goes at once, not when this node ends; with `retain_graph` it stays.
        ctx.maybe_clear_saved_tensors()
        (x_lease, h_lease), options, comes_again = ctx.leases, ctx.options, keeps_graph()
        x_away, h_away = ctx.put_away
        if not comes_again:
            ctx.put_away = None
        expected, excess = ctx.sizes
        cut = Cut(expected, excess, expected_bounds, bounds if excess_bounds is None else excess_bounds)
        dy_SD = dy_SD.contiguous()
        up, down = projections(ctx.forms, matrices, dy_SD)
        info = RowInfo(bounds[-1:], weights_SK, order, up.bias_EO, bounds[1:], options.interleaved)
        x, h = Pair(x_expected, x_excess), Pair(h_expected, h_excess)
        del x_expected, x_excess, h_expected, h_excess
        # Unless backward will want it again, the gradient of `h` takes the place of `h`.
        in_place = not comes_again or (h_away is None and h.expected is None and h.excess is None)
        if h_away is None:
            recompute_missing(h, x, up, cut, x_lease, h_lease, dy_SD)
        dy_RD = permute(dy_SD, inverse_SK, order.numel())
        dinner_RK = down.inner_gradient(dy_RD, bounds)
        da_RN = down.input_gradient(dy_RD, dinner_RK, bounds)
        if h_away is not None:
            h = h_away.pair(dy_SD)
        dh, a_RN, dweights_SK = activation_gradient(h, da_RN, info, options, h_lease, in_place=in_place)
        del h, h_away, da_RN
        if h_lease is not None and not comes_again:
            h_lease.close()
        assert dweights_SK is not None

        of_down = weight_gradients(ctx, "down", down, dy_RD, a_RN, dinner_RK, bounds)
        del a_RN, dinner_RK
        dweights_SK, ddown_bias = down_bias_gradients(
            ctx, dweights_SK, down.bias_EO, dy_SD, dy_RD, weights_SK, ids_SK, inverse_SK, bounds
        )
        del dy_RD, down

        dup_bias = bias_gradient(dh.joined(), bounds) if needs(ctx, "up_bias") else None
        of_factors: tuple[torch.Tensor | None, ...] = (None, None)
        wants_factors = up.update is not None and (needs(ctx, "up_a") or needs(ctx, "up_b"))
        if needs(ctx, "up") or wants_factors:
            if x_away is not None:
                x = x_away.pair(dy_SD)
            elif x.excess is None:
                x.excess = restored(x_lease, dy_SD)
        dup = up_gradient(up, dh, x, cut) if needs(ctx, "up") else None
        dinner = Pair(
            of_rows(up.inner_gradient, dh.expected, cut.expected_bounds),
            of_rows(up.inner_gradient, dh.excess, cut.excess_bounds),
        )
        if wants_factors:
            of_factors = update_gradients(up, dh, dinner, x, cut)
        del x, x_away
        if x_lease is not None and not comes_again:
            x_lease.close()
        dx_SD = None
        if needs(ctx, "x"):
            dh_expected, dh.expected = dh.expected, None
            dx_expected = of_rows(up.input_gradient, dh_expected, dinner.expected, cut.expected_bounds)
            del dh_expected
            dx_excess = of_rows(up.input_gradient, dh.excess, dinner.excess, cut.excess_bounds)
            dx_SD = combine(dx_excess, inverse_SK, expected_SD=dx_expected)
        dweights = dweights_SK.to(weights_SK.dtype) if ctx.needs_input_grad[1] else None
        if ctx.ending is not None and not comes_again:
            ctx.ending.tell()
        return dx_SD, dweights, dup, dup_bias, *of_factors, of_down[0], ddown_bias, *of_down[1:], None


# --- forward ------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """What waits for backward: tensors that autograd saves, and pages."""

    x: Pair
    x_lease: Lease | None
    h: Pair
    h_lease: Lease | None


def _forward_exact(
    x_SD: torch.Tensor,
    inverse_SK: torch.Tensor,
    up: Projection,
    a_columns: int,
    info: RowInfo,
    cut: Cut,
    options: BlockOptions,
) -> tuple[torch.Tensor, Saved]:
    """`a_RN`, and what waits for backward, in two buffers each."""
    capacity, h_columns = cut.expected + cut.excess, up.weight_EOI.shape[1]
    to_pages = options.needs_backward and cut.excess > 0
    x_lease, x_excess_RD = None, None
    if to_pages:
        x_lease = options.x.lease((cut.excess, x_SD.shape[1]), x_SD.dtype, cut.rows)
    if x_lease is not None:
        # As large as `y_RD` will be, and let go after `a_RN` has its memory: one block then serves both.
        x_excess_RD = x_SD.new_empty(capacity, x_SD.shape[1])[: cut.excess]
    # The blocks of what lives for this layer, before those of what stays, which would be cut out of them.
    h_room = x_SD.new_empty(cut.excess, h_columns)
    a_room = x_SD.new_empty(capacity, a_columns)
    x = Pair(
        *permute_split(
            x_SD, inverse_SK, cut.expected, capacity, excess_RD=x_excess_RD, pages=pages_of(x_lease)
        )
    )
    del x_excess_RD
    h = Pair(of_rows(up.forward, x.expected, cut.expected_bounds))
    del h_room
    h.excess = of_rows(up.forward, x.excess, cut.excess_bounds)
    h_lease = None
    if to_pages:
        h_lease = options.h.lease((cut.excess, h_columns), x_SD.dtype, cut.rows, expendable=True)
    del a_room
    a_RN = gated.forward(h.excess, info, options.activation, pages_of(h_lease), expected_SH=h.expected)
    # What is not saved is dropped here. What the pool had no page for is left to autograd, as without a pool.
    if options.x.pool is not None and not (to_pages and x_lease is None):
        x.excess = None
    if options.h.pool is not None or options.h.recompute:
        h.excess = None
    if options.h.recompute:
        h.expected = None
    return a_RN, Saved(x, x_lease, h, h_lease)


def _forward_coded(
    x_SD: torch.Tensor,
    inverse_SK: torch.Tensor,
    up: Projection,
    info: RowInfo,
    bounds: torch.Tensor,
    cut: Cut,
    options: BlockOptions,
    *,
    saves_x: bool,
) -> tuple[torch.Tensor, PutAway | None, PutAway]:
    """`a_RN`, and `x_RD`, if that is asked for, and `h_RH`, which wait in codes."""
    x_RD = permute(x_SD, inverse_SK, cut.expected + cut.excess)
    h_RH = up.forward(x_RD, bounds)
    a_RN = gated.forward(h_RH, info, options.activation)
    # All that lives for this layer has its memory by now, so that no block of what stays is cut out of it. (That of
    # `x_RD` is let go here, and serves the output of the second projection.)
    rows = bounds[-1:]
    x = PutAway.of(x_RD, options.x, cut, rows) if saves_x else None
    return a_RN, x, PutAway.of(h_RH, options.h, cut, rows)


def _claim(x: Pair, h: Pair, order: torch.Tensor, cut: Cut, options: BlockOptions) -> None:
    """Tell a keeper whose the tensors are that autograd saves next, and how many of their rows are valid.

    The expected rows have a known size: a keeper may hand them to the copy engine when the region ends. That is
    safe because forward has launched all that writes them, and the copy waits for the compute stream; and because
    nobody writes them until backward. There, `dh` goes over `h` in what the keeper gives back: memory that the copy
    back has filled and the compute stream has waited for, or, of rows that never left, the buffer itself.
    """
    rows = cut.rows  # one tensor: claims of the same rows move together
    for saving, pair in ((options.x, x), (options.h, h)):
        saving.save(pair.expected, sized=True)
        saving.save(pair.excess, rows=rows, capacity=cut.excess)
    if cut.expected:
        claim(None, order, sized=True)
    else:
        claim(None, order, rows=rows, capacity=cut.excess)


def _record(
    ctx: Any,
    options: BlockOptions,
    x_SD: torch.Tensor,
    h_columns: int,
    matrices: Sequence[torch.Tensor | None],
) -> Ending | None:
    """Tell a keeper that asks what waits for each received row, until the backward of this forward."""
    recording = None if options.counted is None else options.counted.recording
    if recording is None or options.counted is None or not options.needs_backward:
        return None
    sizes = x_SD.shape[1] * x_SD.itemsize, h_columns * x_SD.itemsize
    if options.coded:
        sizes = CodeShape.of(x_SD.shape[1], 1).bytes, CodeShape.of(h_columns, 1).bytes
    x_rule = options.x.stash_rule()
    if options.coded and not asks_for_rows(ctx, options):
        x_rule = None  # no gradient needs them (rows that are not coded stay in any case)
    ruled = zip((x_rule, options.h.stash_rule()), sizes)
    rows = [(size, rule.for_expected_rows()) for rule, size in ruled if rule is not None]
    head_bytes = sum(size * (1 - (0 if leaves is None else leaves.fraction)) for size, leaves in rows)
    weights = (matrices[OF_WEIGHTS.index(name)] for name in ("up", "down") if asked(ctx, name))
    left = sum(weight.nbytes for weight in weights if weight is not None)
    return recording.begin(options.counted, tuple(size for size, _ in rows), round(head_bytes), left)
