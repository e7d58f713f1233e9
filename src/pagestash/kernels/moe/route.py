"""From chosen experts to rows: how many rows each expert gets, and which row every (token, choice) gets.

T tokens choose K of E experts each; R rows of capacity, sorted by expert. A *flat* index is `token * K + choice`.
`order[row]` is the flat index of a row, `inverse[flat]` the row of a flat index, or -1 when it has none (an
expert of another rank, or beyond `capacity`).

What moves: the ids twice, both indices once, and one counter a block and expert. The sort is a counting sort
in three launches; it is stable, uses no atomics, and gives the same bits every time.
"""

from dataclasses import dataclass

import torch

from pagestash.kernels.backend import cdiv, choose, launch, power_of_two, tl, triton

BLOCK = 128
"""Entries a program ranks: it compares all pairs, `PART` columns at a time."""
PART = 32
SCAN = 1024


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the rows go; everything stays on the device."""

    counts: torch.Tensor  # int32 [E]: rows wanted by each expert, also beyond the capacity
    bounds: (
        torch.Tensor
    )  # int32 [E + 1]: where each expert's rows begin, and last where all end: 0 … capacity
    order: torch.Tensor  # int32 [capacity]: flat index of each row; undefined past the valid rows
    inverse: torch.Tensor  # int32 [T, K]: row of each flat index, or -1

    @property
    def offsets(self) -> torch.Tensor:
        """Int32 [E]: where each expert's rows end."""
        return self.bounds[1:]

    @property
    def rows(self) -> torch.Tensor:
        """The number of valid rows: one int32 on the device."""
        return self.bounds[-1:]


def route(
    ids_TK: torch.Tensor,
    experts: int,
    *,
    first: int = 0,
    capacity: int | None = None,
    over: torch.Tensor | None = None,
    backend: str = "auto",
) -> Routing:
    """Sort the choices `ids_TK` by expert, for the experts `first` to `first + experts - 1`.

    Ids outside that range get no row. With more rows than `capacity` (default: T × K, which always suffices) the
    last ones get none, and `over`, a float32 on the device, is set to 1.
    """
    if ids_TK.ndim != 2 or ids_TK.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"ids of shape {tuple(ids_TK.shape)} and {ids_TK.dtype}: expected [tokens, K] of integers"
        )
    if experts < 1:
        raise ValueError(f"experts={experts}: expected at least 1")
    if capacity is None:
        capacity = ids_TK.numel()
    if not 0 <= capacity < 2**31 or ids_TK.numel() >= 2**31:
        raise ValueError(f"capacity={capacity} for {ids_TK.numel()} choices: both must be below 2**31")
    device = ids_TK.device
    found = Routing(
        counts=torch.empty(experts, dtype=torch.int32, device=device),
        bounds=torch.empty(experts + 1, dtype=torch.int32, device=device),
        order=torch.empty(capacity, dtype=torch.int32, device=device),
        inverse=torch.empty(ids_TK.shape, dtype=torch.int32, device=device),
    )
    if choose(device, backend) == "torch":
        route_reference(ids_TK, first, over, found)
    else:
        _launch(ids_TK.contiguous(), first, over, found)
    return found


# --- what: the torch reference ------------------------------------------------------------------------------


def route_reference(ids_TK: torch.Tensor, first: int, over: torch.Tensor | None, out: Routing) -> None:
    experts, capacity = out.counts.numel(), out.order.numel()
    flat = ids_TK.reshape(-1).to(torch.int64) - first
    valid = (flat >= 0) & (flat < experts)
    expert = torch.where(valid, flat, experts)
    counts = torch.bincount(expert, minlength=experts + 1)[:experts]
    order = torch.argsort(expert, stable=True)[: min(int(counts.sum()), capacity)]
    out.counts.copy_(counts)
    out.bounds[0] = 0
    out.offsets.copy_(counts.cumsum(0).clamp(max=capacity))
    out.order[: order.numel()] = order.to(torch.int32)
    out.inverse.fill_(-1)
    out.inverse.view(-1)[order] = torch.arange(order.numel(), dtype=torch.int32, device=ids_TK.device)
    if over is not None and int(counts.sum()) > capacity:
        over.fill_(1.0)


# --- how: the Triton kernels --------------------------------------------------------------------------------


@triton.jit
def _expert_of(ids, at, entries, first, experts):
    """The local expert of entries `at`, or `experts` where they count for none."""
    expert = tl.load(ids + at, mask=at < entries, other=-1).to(tl.int32) - first
    return tl.where((at < entries) & (expert >= 0) & (expert < experts), expert, experts)


@triton.jit(do_not_specialize=["first"])
def _count_kernel(
    ids,
    blocks_EB,
    entries,
    first,
    experts,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """Rows each block of entries has for each expert, `blocks_EB[expert, block]`."""
    block = tl.program_id(0)
    expert = _expert_of(ids, block * BLOCK + tl.arange(0, BLOCK), entries, first, experts)
    start = 0
    while start < experts:
        column = start + tl.arange(0, PART)
        count = tl.sum((expert[:, None] == column[None, :]).to(tl.int32), axis=0)
        # 64-bit: experts × blocks passes 2**31 only with billions of entries, but the product is free.
        at = column.to(tl.int64) * tl.num_programs(0) + block
        tl.store(blocks_EB + at, count, mask=column < experts)
        start += PART


@triton.jit
def _scan_kernel(blocks_EB, counts, blocks, SCAN: tl.constexpr):
    """Turn one expert's counts into the rows it has in the blocks before, and keep the total."""
    expert = tl.program_id(0)
    row = blocks_EB + expert.to(tl.int64) * blocks
    before = tl.zeros((), tl.int32)
    start = 0
    while start < blocks:
        at = start + tl.arange(0, SCAN)
        count = tl.load(row + at, mask=at < blocks, other=0)
        tl.store(row + at, before + tl.cumsum(count, 0) - count, mask=at < blocks)
        before += tl.sum(count)
        start += SCAN
    tl.store(counts + expert, before)


@triton.jit(do_not_specialize=["first", "capacity"])
def _place_kernel(
    ids,
    blocks_EB,
    counts,
    bounds,
    order,
    inverse,
    over,
    entries,
    first,
    experts,
    capacity,
    FLAGGED: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """A row is what came before: smaller experts, this expert in earlier blocks, and in this block."""
    block = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    at = block * BLOCK + within
    expert = _expert_of(ids, at, entries, first, experts)
    row = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, BLOCK, PART):
        others = start + tl.arange(0, PART)
        other = _expert_of(ids, block * BLOCK + others, entries, first, experts)
        earlier = (expert[:, None] == other[None, :]) & (others[None, :] < within[:, None])
        row += tl.sum(earlier.to(tl.int32), axis=1)
    mine = blocks_EB + expert.to(tl.int64) * tl.num_programs(0) + block
    row += tl.load(mine, mask=expert < experts, other=0)
    start = 0
    while start < experts:
        column = start + tl.arange(0, PART)
        count = tl.load(counts + column, mask=column < experts, other=0)
        row += tl.sum(tl.where(column[None, :] < expert[:, None], count[None, :], 0), axis=1)
        start += PART
    placed = (expert < experts) & (row < capacity)
    tl.store(inverse + at, tl.where(placed, row, -1), mask=at < entries)
    tl.store(order + row, at, mask=placed)
    if block == 0:
        column = tl.arange(0, EXPERTS)
        end = tl.cumsum(tl.load(counts + column, mask=column < experts, other=0), 0)
        tl.store(bounds, 0)
        tl.store(bounds + 1 + column, tl.minimum(end, capacity), mask=column < experts)
        if FLAGGED:
            if tl.max(end, 0) > capacity:
                tl.store(over, 1.0)


def _launch(ids_TK: torch.Tensor, first: int, over: torch.Tensor | None, out: Routing) -> None:
    entries, experts = ids_TK.numel(), out.counts.numel()
    blocks = max(1, cdiv(entries, BLOCK))
    blocks_EB = torch.empty(experts, blocks, dtype=torch.int32, device=ids_TK.device)
    shared = {"BLOCK": BLOCK, "PART": PART}
    launch(_count_kernel, (blocks,), ids_TK.device, ids_TK, blocks_EB, entries, first, experts, **shared)
    launch(_scan_kernel, (experts,), ids_TK.device, blocks_EB, out.counts, blocks, SCAN=SCAN)
    launch(
        _place_kernel,
        (blocks,),
        ids_TK.device,
        ids_TK,
        blocks_EB,
        out.counts,
        out.bounds,
        out.order,
        out.inverse,
        out.counts if over is None else over,
        entries,
        first,
        experts,
        out.order.numel(),
        FLAGGED=over is not None,
        EXPERTS=power_of_two(experts),
        **shared,
    )
