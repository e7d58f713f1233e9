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

**Eight bits.** Under rules with `bits=8` for both, codes of `x_RD` and `h_RH` wait in their place, in two buffers,
or in one and in pages. Rows and projection live for one layer then, so that they are in one buffer each. The
kernel that permutes codes `x_RD`; a pass before the gradient of `up` decodes it, because a product cannot read
codes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from pagestash.kernels.backward import differentiable_once
from pagestash.kernels.moe import gated
from pagestash.kernels.moe.accumulate import accumulate_
from pagestash.kernels.moe.activation import as_activation
from pagestash.kernels.moe.coded_rows import decode_rows, permute_coded
from pagestash.kernels.moe.combine import combine
from pagestash.kernels.moe.ends import cut_bounds, missing_bounds
from pagestash.kernels.moe.permute import permute, permute_split
from pagestash.kernels.moe.route import Routing
from pagestash.kernels.moe.row_codes import CodeRow, RowCodes
from pagestash.kernels.moe.row_info import RowInfo
from pagestash.moe.bias import bias_gradient, down_bias_gradient, weights_gradient_of_bias
from pagestash.moe.lease import Lease, pages_of
from pagestash.moe.local import asks_for_rows
from pagestash.moe.projection import Form, LowRank, Projection, Weight, in_dtype_of
from pagestash.moe.saving import BlockOptions, needs
from pagestash.saved.fused import claim, fused
from pagestash.saved.received_rows import Ending
from pagestash.saved.region import frames
from pagestash.torch_internals import keeps_graph


@dataclass(slots=True)
class Pair:
    """A tensor for the expected rows and one for the rows in excess; None where it is in pages, or recomputed."""

    expected: torch.Tensor | None = None
    excess: torch.Tensor | None = None

    def joined(self) -> torch.Tensor:
        """All rows in one buffer: a copy where there are two."""
        assert self.excess is not None
        return self.excess if self.expected is None else torch.cat([self.expected, self.excess])


class Cut(NamedTuple):
    """How many rows are expected, how many in excess, and where each expert's begin and end in either buffer."""

    expected: int
    excess: int
    expected_bounds: torch.Tensor | None
    excess_bounds: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """The valid rows in excess."""
        return self.excess_bounds[-1:]


class Call(NamedTuple):
    """What a call needs besides the tensors that may require a gradient."""

    ids_SK: torch.Tensor | None
    routing: Routing
    cut: Cut
    options: BlockOptions
    forms: tuple[Form, Form]


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
    # The kernels read both by choice, one after the other; the ids for the sake of `down`'s bias alone.
    weights_SK = weights_SK.contiguous()
    ids = None if down.bias_EO is None else ids_SK.contiguous()
    capacity = routing.order.numel()
    expected = min(max(expected_rows, 0), capacity)
    log = options.counted.log_on(x_SD.device) if options.counted and options.needs_backward else None
    cut = Cut(0, capacity, None, routing.bounds)
    if expected or log is not None:
        bounds = cut_bounds(routing.bounds, expected, log=log)
        if expected:
            cut = Cut(expected, capacity - expected, *bounds)
    call = Call(ids, routing, cut, options, (up.form(), down.form()))
    with fused(*up.tensors(), *down.tensors()):
        return ReceivedExperts.apply(x_SD, weights_SK, *up.tensors(), *down.tensors(), call)


class ReceivedExperts(torch.autograd.Function):
    """See `received_experts`, and the top of the file for what it saves."""

    inputs = (
        "x", "weights", "up", "up_bias", "up_a", "up_b", "down", "down_bias", "down_a", "down_b", "call",
    )  # fmt: skip

    @staticmethod
    def forward(
        ctx: Any,
        x_SD: torch.Tensor,
        weights_SK: torch.Tensor,
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
        ids_SK, routing, cut, options, forms = call
        bounds, order, inverse_SK = routing.bounds, routing.order, routing.inverse
        ctx.inputs = ReceivedExperts.inputs
        up = Projection.of(forms[0].weight(up_stored, up_a_EKD, up_b_EHK), x_SD)
        down = Projection.of(forms[1].weight(down_stored, down_a_EKN, down_b_EDK), x_SD)
        up_bias, down_bias = in_dtype_of(x_SD, up_bias_EH, down_bias_ED)
        columns = up.weight_EOI.shape[1]
        options = options.by_rules(x_SD, order.numel(), columns, received=True)
        info = RowInfo(bounds[-1:], bias=up_bias, offsets=bounds[1:], interleaved=options.interleaved)
        if options.coded:
            saves_x = asks_for_rows(ctx, options)
            a_RN, saved = _forward_coded(x_SD, inverse_SK, up, info, bounds, cut, options, saves_x=saves_x)
        else:
            a_RN, saved = _forward_exact(x_SD, inverse_SK, up, down.weight_EOI.shape[2], info, cut, options)
        x, x_lease, h, h_lease = saved
        y_RD = down.forward(a_RN, bounds)
        del a_RN
        y_SD = combine(
            y_RD,
            inverse_SK,
            weights_SK,
            bias_ED=down_bias,
            bias_ids_TK=ids_SK,
            bias_weights_TK=weights_SK if down_bias is not None else None,
        )
        if frames():
            _claim(x, h, order, cut, options)
        ctx.save_for_backward(
            weights_SK, up_stored, up_bias_EH, up_a_EKD, up_b_EHK, down_stored, down_bias_ED, down_a_EKN,
            down_b_EDK, ids_SK, bounds, order, inverse_SK, cut.expected_bounds, cut.excess_bounds if cut.expected
            else None, x.expected, x.excess, h.expected, h.excess,
        )  # fmt: skip
        ctx.leases, ctx.sizes, ctx.options, ctx.forms = (x_lease, h_lease), cut[:2], options, forms
        ctx.ending = _record(ctx, options, x_SD, columns, up_stored, down_stored)
        return y_SD

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_SD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (
            weights_SK, up_stored, up_bias_EH, up_a, up_b, down_stored, down_bias_ED, down_a, down_b,
            ids_SK, bounds, order, inverse_SK, expected_bounds, excess_bounds,
            x_expected, x_excess, h_expected, h_excess,
        ) = ctx.saved_tensors  # fmt: skip
        # What is done with goes at once, not when this node ends; with `retain_graph` it stays.
        ctx.maybe_clear_saved_tensors()
        (x_lease, h_lease), options, comes_again = ctx.leases, ctx.options, keeps_graph()
        expected, excess = ctx.sizes
        cut = Cut(expected, excess, expected_bounds, bounds if excess_bounds is None else excess_bounds)
        dy_SD = dy_SD.contiguous()
        up_weight = ctx.forms[0].weight(up_stored, up_a, up_b)
        down_weight = ctx.forms[1].weight(down_stored, down_a, down_b)
        up, down = Projection.of(up_weight, dy_SD), Projection.of(down_weight, dy_SD)
        up_bias, down_bias = in_dtype_of(dy_SD, up_bias_EH, down_bias_ED)
        info = RowInfo(bounds[-1:], weights_SK, order, up_bias, bounds[1:], options.interleaved)
        x, h = Pair(x_expected, x_excess), Pair(h_expected, h_excess)
        del x_expected, x_excess, h_expected, h_excess
        # Unless backward will want it again, the gradient of `h` takes the place of `h`.
        in_place = not comes_again or (h.expected is None and h.excess is None)
        if options.coded:
            codes = RowCodes(CodeRow(1, dy_SD.shape[1]), x.expected, x.excess, pages_of(x_lease))
            excess_rows = partial(_decoded, codes, bounds[-1:], order.numel(), dy_SD)
            x, cut = Pair(), Cut(0, order.numel(), None, bounds)
            del codes
        else:
            excess_rows = partial(_restored, x_lease, dy_SD)
            _recompute_missing(h, x, up, cut, x_lease, h_lease, dy_SD)
        dy_RD = permute(dy_SD, inverse_SK, order.numel())
        dinner_RK = down.inner_gradient(dy_RD, bounds)
        da_RN = down.input_gradient(dy_RD, dinner_RK, bounds)
        dh, a_RN, dweights_SK = _activation_gradient(h, da_RN, info, options, h_lease, in_place=in_place)
        del h, da_RN
        if h_lease is not None and not comes_again:
            h_lease.close()
        assert dweights_SK is not None

        ddown = down.gradient(dy_RD, a_RN, bounds) if needs(ctx, "down") else None
        ddown_a, ddown_b = None, None
        if dinner_RK is not None and (needs(ctx, "down_a") or needs(ctx, "down_b")):
            ddown_a, ddown_b = down.update_gradients(down_weight.update, a_RN, dy_RD, dinner_RK, bounds)
        del a_RN, dinner_RK, down
        ddown_bias = None
        if down_bias is not None:
            dweights_SK = dweights_SK + weights_gradient_of_bias(dy_SD, down_bias, ids_SK, inverse_SK)
            if needs(ctx, "down_bias"):
                ddown_bias = down_bias_gradient(dy_SD, dy_RD, weights_SK, inverse_SK, bounds)
        del dy_RD

        dup_bias = bias_gradient(dh.joined(), bounds) if needs(ctx, "up_bias") else None
        dup = _up_gradient(up, dh, x, excess_rows, cut) if needs(ctx, "up") else None
        dinner = Pair(
            _of(up.inner_gradient, dh.expected, cut.expected_bounds),
            _of(up.inner_gradient, dh.excess, cut.excess_bounds),
        )
        dup_a, dup_b = None, None
        if up_weight.update is not None and (needs(ctx, "up_a") or needs(ctx, "up_b")):
            dup_a, dup_b = _update_gradients(up, up_weight.update, dh, dinner, x, excess_rows, cut)
        del x, excess_rows
        if x_lease is not None and not comes_again:
            x_lease.close()
        dx_SD = None
        if needs(ctx, "x"):
            dh_expected, dh.expected = dh.expected, None
            dx_expected = _of(up.input_gradient, dh_expected, dinner.expected, cut.expected_bounds)
            del dh_expected
            dx_excess = _of(up.input_gradient, dh.excess, dinner.excess, cut.excess_bounds)
            dx_SD = combine(dx_excess, inverse_SK, expected_SD=dx_expected)
        dweights = dweights_SK.to(weights_SK.dtype) if ctx.needs_input_grad[1] else None
        if ctx.ending is not None and not comes_again:
            ctx.ending.tell()
        return dx_SD, dweights, dup, dup_bias, dup_a, dup_b, ddown, ddown_bias, ddown_a, ddown_b, None


# --- forward ------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """What waits for backward: tensors that autograd saves, and pages. Of a block that codes, both are codes."""

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
    h = Pair(_of(up.forward, x.expected, cut.expected_bounds))
    del h_room
    h.excess = _of(up.forward, x.excess, cut.excess_bounds)
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
) -> tuple[torch.Tensor, Saved]:
    """`a_RN`, and the codes that wait."""
    capacity, columns = cut.expected + cut.excess, up.weight_EOI.shape[1]
    # The blocks of what lives for this layer, before those of what stays, which would be cut out of them.
    x_RD = x_SD.new_empty(capacity, x_SD.shape[1])
    h_room = x_SD.new_empty(capacity, columns)
    parts = as_activation(options.activation).parts
    a_room = x_SD.new_empty(capacity, columns // parts)
    sizes = (cut.expected, cut.excess, cut.rows, x_SD.device)
    x, x_lease = Pair(), None
    if saves_x:
        x_codes, x_lease = options.x.codes(CodeRow(1, x_SD.shape[1]), *sizes)
        x = Pair(x_codes.expected_SC, x_codes.excess_RC)
        permute_coded(x_SD, inverse_SK, x_codes, x_RD)
    else:
        permute(x_SD, inverse_SK, capacity, out_RD=x_RD)
    h_codes, h_lease = options.h.codes(CodeRow(parts, columns // parts), *sizes)
    del h_room
    h_RH = up.forward(x_RD, bounds)
    del a_room
    a_RN = gated.forward(h_RH, info, options.activation, codes=h_codes)
    # (The block of `x_RD` is let go here, and serves the output of the second projection.)
    return a_RN, Saved(x, x_lease, Pair(h_codes.expected_SC, h_codes.excess_RC), h_lease)


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
    up_stored: torch.Tensor,
    down_stored: torch.Tensor,
) -> Ending | None:
    """Tell a keeper that asks what waits for each received row, until the backward of this forward."""
    recording = None if options.counted is None else options.counted.recording
    if recording is None or options.counted is None or not options.needs_backward:
        return None
    sizes = x_SD.shape[1] * x_SD.itemsize, h_columns * x_SD.itemsize
    if options.coded:
        parts = as_activation(options.activation).parts
        sizes = CodeRow(1, x_SD.shape[1]).bytes, CodeRow(parts, h_columns // parts).bytes
    x_rule = options.x.stash_rule()
    if options.coded and not asks_for_rows(ctx, options):
        x_rule = None  # (a block that does not code keeps received rows in any case)
    ruled = zip((x_rule, options.h.stash_rule()), sizes)
    rows = [(size, rule.for_expected_rows()) for rule, size in ruled if rule is not None]
    head_bytes = sum(size * (1 - (0 if leaves is None else leaves.fraction)) for size, leaves in rows)
    gradients = (("up", up_stored), ("down", down_stored))
    left = sum(w.nbytes for name, w in gradients if ctx.needs_input_grad[ctx.inputs.index(name)])
    return recording.begin(options.counted, tuple(size for size, _ in rows), round(head_bytes), left)


# --- backward -----------------------------------------------------------------------------------------------


def _restored(lease: Lease | None, like_SD: torch.Tensor, *, unless: Lease | None = None) -> torch.Tensor:
    """The rows in excess out of their pages; undefined ones where the lease `unless` got its pages."""
    return like_SD.new_empty(0, like_SD.shape[1]) if lease is None else lease.restore(unless=unless)


def _decoded(codes: RowCodes, rows: torch.Tensor, capacity: int, like_SD: torch.Tensor) -> torch.Tensor:
    return decode_rows(codes, rows, like_SD.new_empty(capacity, like_SD.shape[1]))


def _recompute_missing(
    h: Pair,
    x: Pair,
    up: Projection,
    cut: Cut,
    x_lease: Lease | None,
    h_lease: Lease | None,
    like_SD: torch.Tensor,
) -> None:
    """Give `h` the parts that were not saved. (Where pages have the excess, a buffer that nobody reads.)"""
    if h.expected is None:
        h.expected = _of(up.forward, x.expected, cut.expected_bounds)
    if h.excess is None:
        # Rows that stay for the gradient of `up` come back whole. Few rows in one of the largest buffers do not
        # stay meanwhile: here they come back only where pages of `h` are missing, and for that gradient once more.
        stays = x_lease is None or not cut.expected
        x_RD = x.excess
        if x_RD is None:
            x_RD = _restored(x_lease, like_SD, unless=None if stays else h_lease)
        missing = cut.excess_bounds if h_lease is None else missing_bounds(cut.excess_bounds, h_lease.pages)
        h.excess = up.forward(x_RD, missing)
        if stays:
            x.excess = x_RD


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
        row = CodeRow(as_activation(options.activation).parts, da_RN.shape[1])
        codes = RowCodes(row, h.expected, h.excess, pages_of(lease))
        dh_RH, a_RN, dweights_SK = gated.backward_of_codes(codes, da_RN, info, options.activation)
        return Pair(None, dh_RH), a_RN, dweights_SK
    assert h.excess is not None
    dh = Pair(h.expected)
    if h.expected is not None and not in_place:
        dh.expected = torch.empty_like(h.expected)
    dh.excess, a_RN, dweights_SK = gated.backward(
        h.excess,
        da_RN,
        info,
        options.activation,
        pages_of(lease),
        expected_SH=h.expected,
        dexpected_SH=dh.expected,
        in_place=in_place,
    )
    return dh, a_RN, dweights_SK


def _up_gradient(
    up: Projection, dh: Pair, x: Pair, excess_rows: Callable[[], torch.Tensor], cut: Cut
) -> torch.Tensor:
    """The gradient of `up`, of both parts; of those in excess only experts that have rows there are touched."""
    assert dh.excess is not None
    dup = None
    if dh.expected is not None:
        assert x.expected is not None
        assert cut.expected_bounds is not None
        dup = up.gradient(dh.expected, x.expected, cut.expected_bounds)
        if not cut.excess:
            return dup
    x_RD = excess_rows() if x.excess is None else x.excess
    if dup is None:
        return up.gradient(dh.excess, x_RD, cut.excess_bounds)
    if not dup.is_contiguous():  # stored as the weight is, with columns and rows exchanged
        accumulate_(dup.mT, x_RD, dh.excess, cut.excess_bounds[1:])
        return dup
    return accumulate_(dup, dh.excess, x_RD, cut.excess_bounds[1:])


def _update_gradients(
    up: Projection,
    update: LowRank,
    dh: Pair,
    dinner: Pair,
    x: Pair,
    excess_rows: Callable[[], torch.Tensor],
    cut: Cut,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the factors of the first projection's update: the sums of both parts."""
    x_RD = excess_rows() if x.excess is None else x.excess
    parts: Any = [
        (x.expected, dh.expected, dinner.expected, cut.expected_bounds),
        (x_RD, dh.excess, dinner.excess, cut.excess_bounds),
    ]
    found = [up.update_gradients(update, *part) for part in parts if part[1] is not None and part[1].shape[0]]
    if not found:  # no row at all
        return torch.zeros_like(update.a_EKI), torch.zeros_like(update.b_EOK)
    (da, db), *more = found
    for more_a, more_b in more:
        da, db = da + more_a, db + more_b
    return da, db


def _of(function: Callable[..., Any], rows: torch.Tensor | None, *more: Any) -> Any:
    """What `function` makes of a buffer's rows; None of none."""
    return None if rows is None else function(rows, *more)
