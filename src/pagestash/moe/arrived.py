"""The expert block for rows that came over a wire: they cannot be had again, and must wait for backward.

Shapes as in `block.py`: T slots off the wire with K choices each, R rows of capacity, E experts here, d the model's
width, n an expert's. R is what may arrive at worst, several times what does. The first S rows, those that usually
arrive (`expected_rows`), are the *head*: its received rows and first projections have buffers of just that size,
which simply stay until backward. The *rest*, R - S rows, has buffers that live for one layer; what is valid of
them goes to pages. So bytes are copied only for rows beyond what was expected, and what stays is ordinary memory,
which other tensors get when a layer's backward is over.

The rows stand in one order all the same, and products over all of them are single ones. Only those that read the
two buffers are in two: `h`, the gradient of the received rows, and that of `up`, to which the rest is added. That
sum has another order than without a head: its bits do not depend on pages, but they do on `expected_rows`.
"""

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from pagestash.kernels.moe import gated as gated_kernels
from pagestash.kernels.moe.accumulate import accumulate_
from pagestash.kernels.moe.ends import cut_ends
from pagestash.kernels.moe.gated import RowInfo
from pagestash.kernels.moe.grouped import grouped_mm
from pagestash.kernels.moe.permute import combine, spread, spread_in_two
from pagestash.kernels.moe.route import Routing
from pagestash.kernels.pages.paged import Pages
from pagestash.moe.block import (
    BlockOptions,
    bias_gradient,
    down_bias_gradients,
    in_dtype_of,
    needs,
    project_again,
)
from pagestash.moe.lease import Lease, graph_is_kept
from pagestash.pages.pool import PagePool
from pagestash.saved.fused import claim, note_weights, stay
from pagestash.saved.region import region


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where the rows are cut in two: what the host knows, and each expert's end in either part."""

    head: int
    rest: int
    head_ends: torch.Tensor
    rest_ends: torch.Tensor


def arrived_experts(
    slots: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    routing: Routing,
    options: BlockOptions,
    *,
    expected_rows: int = 0,
    residual: bool = False,
) -> torch.Tensor:
    """Slots [T, d] through their experts and back to their places, with `residual` summed onto the slots.

    `weights` and `ids` [T, K] belong to the choices; `ids` count from this rank's first expert, and are read
    for the sake of `down_bias` alone.
    """
    capacity = routing.order.numel()
    head = min(max(expected_rows, 0), capacity)
    cut = _Cut(head, capacity - head, *cut_ends(routing.offsets, head))
    with region():
        note_weights(up, up_bias, down, down_bias)
        return ArrivedExperts.apply(
            slots, weights, up, down, up_bias, down_bias, ids, routing, cut, options, residual
        )


class ArrivedExperts(torch.autograd.Function):
    """See `arrived_experts`; saves received rows and first projections, each in two parts."""

    inputs = (
        "x", "weights", "up", "down", "up_bias", "down_bias", "ids", "routing", "cut", "options", "residual",
    )  # fmt: skip

    @staticmethod
    def forward(ctx, x, weights, up, down, up_bias, down_bias, ids, routing, cut, options, residual):
        up_x, down_x, up_bias_x, down_bias_x = in_dtype_of(x, up, down, up_bias, down_bias)
        order, inverse, capacity = routing.order, routing.inverse, cut.head + cut.rest
        info = RowInfo(routing.rows, weights, order, up_bias_x, routing.offsets)
        rest_rows = cut.rest_ends[-1:]
        rows, h = options.rows, options.h
        stashes = options.kept and cut.rest > 0
        rows_lease = h_lease = x_rest = None
        if stashes and rows.pool is not None and not _denied(rows.pool, x, rest_rows, cut.rest):
            rows_lease = Lease(rows.pool, (cut.rest, x.shape[1]), x.dtype, rest_rows, account=rows.account)
            # As large as `y_RD` will be, and let go after `a` has its memory: one block then serves both.
            x_rest = x.new_empty(capacity, x.shape[1])[: cut.rest]
        # The blocks of what lives for this layer, before those of what stays, which would be cut out of them.
        h_room, a_room = x.new_empty(cut.rest, up.shape[1]), x.new_empty(capacity, down.shape[2])
        x_head, x_rest = spread_in_two(x, inverse, cut.head, capacity, rest=x_rest, pages=_pages(rows_lease))
        h_head = _product(x_head, up_x.transpose(-2, -1), cut.head_ends)
        del h_room
        h_rest = _product(x_rest, up_x.transpose(-2, -1), cut.rest_ends)
        if stashes and h.pool is not None and not h.again:
            shape = (cut.rest, up.shape[1])
            h_lease = Lease(h.pool, shape, x.dtype, rest_rows, account=h.account, expendable=True)
        del a_room
        a = gated_kernels.forward(h_rest, info, options.activation, _pages(h_lease), head=h_head)
        # What the pool has no page for is left to autograd, as without a pool.
        in_pages = rows.pool is not None and not (stashes and rows_lease is None)
        saved_rows = (x_head, None if in_pages else x_rest)
        saved_h = (None if h.again else h_head, None if h.pool is not None or h.again else h_rest)
        del x_head, x_rest, h_head, h_rest
        y_RD = grouped_mm(a, down_x.transpose(-2, -1), routing.offsets)
        del a
        y = combine(
            y_RD,
            inverse,
            bias=down_bias_x,
            bias_ids=ids,
            bias_weights=weights if down_bias is not None else None,
            added=x if residual else None,
        )
        for place, (head, rest) in ((rows, saved_rows), (h, saved_h)):
            place.claim(head)
            place.claim(rest, rows=rest_rows, capacity=cut.rest)
            stay(head)
        if cut.head:
            stay(order)
        else:
            claim(None, order, rows=rest_rows, capacity=cut.rest)
        ctx.save_for_backward(
            weights, up, down, up_bias, down_bias, ids, routing.offsets, order, inverse,
            cut.head_ends, cut.rest_ends, *saved_rows, *saved_h,
        )  # fmt: skip
        ctx.leases, ctx.cut_at, ctx.inputs = (
            (rows_lease, h_lease),
            (cut.head, cut.rest),
            ArrivedExperts.inputs,
        )
        ctx.options, ctx.residual = options, residual
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (
            weights, up, down, up_bias, down_bias, ids, offsets, order, inverse,
            head_ends, rest_ends, x_head, x_rest, h_head, h_rest,
        ) = ctx.saved_tensors  # fmt: skip
        # What is done with goes at once, not when this node ends; with `retain_graph` it stays.
        ctx.maybe_clear_saved_tensors()
        rows_lease, h_lease = ctx.leases
        activation, again = ctx.options.activation, graph_is_kept()
        head, rest = ctx.cut_at
        dy = dy.contiguous()
        up, down, up_bias, down_bias = in_dtype_of(dy, up, down, up_bias, down_bias)
        info = RowInfo(offsets[-1:], weights, order, up_bias, offsets)
        if h_head is None:
            h_head = _product(x_head, up.transpose(-2, -1), head_ends)
        elif again:
            h_head = h_head.clone()
        if not rest:
            h_rest = h_head.new_empty(0, up.shape[1])
        elif h_rest is None:
            x_rest = rows_lease.restore() if x_rest is None else x_rest
            h_rest = project_again(x_rest, up, h_lease, rest_ends)
            if rows_lease is not None and head:
                # Few rows in one of the largest buffers: they come back twice rather than stay meanwhile.
                x_rest = None
        elif again:
            h_rest = h_rest.clone()
        dy_RD = spread(dy, inverse, head + rest)
        da = grouped_mm(dy_RD, down, offsets)
        # In place: `h` becomes its gradient.
        dh_rest, a, dweights = gated_kernels.backward(
            h_rest, da, info, activation, _pages(h_lease), head=h_head, in_place=True
        )
        dh_head = h_head
        del h_head, h_rest, da
        if h_lease is not None and not again:
            h_lease.close()
        ddown = grouped_mm(dy_RD.t(), a, offsets) if needs(ctx, "down") else None
        del a
        dup_bias = ddown_bias = None
        if down_bias is not None:
            assert dweights is not None
            more, ddown_bias = down_bias_gradients(dy, dy_RD, weights, down_bias, ids, inverse, offsets)
            dweights = dweights + more
        del dy_RD
        if up_bias is not None:
            dup_bias = bias_gradient(torch.cat([dh_head, dh_rest]), offsets)
        dup = None
        if needs(ctx, "up"):
            if head:
                dup = grouped_mm(dh_head.t(), x_head, head_ends)
            if rest:
                x_rest = rows_lease.restore() if x_rest is None else x_rest
                if dup is None:
                    dup = grouped_mm(dh_rest.t(), x_rest, rest_ends)
                else:
                    accumulate_(dup, dh_rest, x_rest, rest_ends)
        del x_head, x_rest
        if rows_lease is not None and not again:
            rows_lease.close()
        dx = None
        if needs(ctx, "x"):
            dx_head = _product(dh_head, up, head_ends)
            del dh_head
            dx_rest = _product(dh_rest, up, rest_ends)
            dx = combine(dx_head, inverse, rest=dx_rest, added=dy if ctx.residual else None)
        return dx, dweights, dup, ddown, dup_bias, ddown_bias, None, None, None, None, None


def _denied(pool: PagePool, x: torch.Tensor, rows: torch.Tensor, capacity: int) -> bool:
    """Whether a step that keeps what finds no page has none for rows like those of `x`."""
    pool.flush()
    return pool.room.denies(capacity * x.shape[1] * x.element_size(), rows, capacity)


def _pages(lease: Lease | None) -> Pages | None:
    return None if lease is None else lease.pages


def _product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`grouped_mm`, also for a buffer of no rows."""
    if not rows.shape[0]:
        return rows.new_empty(0, matrices.shape[2])
    return grouped_mm(rows, matrices, ends)
