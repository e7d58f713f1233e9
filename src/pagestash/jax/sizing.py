"""How many rows a ring-of-experts shard computes, and what storing them costs.

    expected      every expert equally loaded: B·S·K rows per shard
    worst case    every token's experts on one shard: EP·B·S·min(K, E/EP) rows

B batch per shard, S sequence, K top-k, E experts, EP shards. A stash saves up to the ratio of the two; `plan()`
prints the bytes.
"""

import math
from dataclasses import dataclass

GIB = 2**30


def expected_rows(batch: int, ep: int, seq: int, top_k: int) -> int:
    """Rows per shard and layer at even load: the rows of all `ep·batch·seq` tokens, divided among `ep` shards.

    Examples:
        >>> expected_rows(batch=2, ep=4, seq=4096, top_k=8)
        65536
    """
    _positive(batch=batch, ep=ep, seq=seq, top_k=top_k)
    return ep * batch * seq * top_k // ep


def worst_case_rows(batch: int, ep: int, seq: int, top_k: int, num_experts: int) -> int:
    """Rows per shard and layer that no routing exceeds: a token can choose each local expert once.

    Examples:
        >>> worst_case_rows(batch=2, ep=4, seq=4096, top_k=8, num_experts=256)
        262144
    """
    _positive(batch=batch, ep=ep, seq=seq, top_k=top_k, num_experts=num_experts)
    if num_experts % ep:
        raise ValueError(f"{num_experts} experts cannot be split over {ep} shards; choose a divisor")
    return ep * batch * seq * min(top_k, num_experts // ep)


def buffer_bytes(
    rows: int, row_elements: int, layers: int, *, capacity_factor: float = 1.0, dtype_bytes: int = 2
) -> int:
    """Bytes of a buffer for `layers` layers of `rows` rows; the stashed widths add up to `row_elements`.

    Examples:
        >>> buffer_bytes(65_536, 7168, 60) / 2**30
        52.5
    """
    _positive(rows=rows, row_elements=row_elements, layers=layers, dtype_bytes=dtype_bytes)
    if capacity_factor < 0:
        raise ValueError(f"capacity_factor is {capacity_factor}; it has to be 0 or more")
    return math.ceil(capacity_factor * layers * rows) * row_elements * dtype_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One strategy of a plan."""

    strategy: str
    rows: int
    nbytes: int
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What each way of storing a layer's rows costs, for all layers of one shard."""

    title: str
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        wide = max(len(line.strategy) for line in self.lines)
        head = f"{'strategy':<{wide}}  {'rows a layer':>12}  {'GiB':>8}"
        body = [
            f"{x.strategy:<{wide}}  {x.rows:>12,}  {x.nbytes / GIB:>8.2f}  {x.note}".rstrip()
            for x in self.lines
        ]
        return "\n".join([self.title, head, *body])


def plan(
    *,
    batch: int = 2,
    ep: int = 4,
    seq: int = 4096,
    top_k: int = 8,
    num_experts: int = 256,
    width: int = 7168,
    layers: int = 60,
    dtype_bytes: int = 2,
    factors: tuple[float, ...] = (1.5, 1.0),
    show: bool = True,
) -> Plan:
    """Print what saving one tensor of `width` costs over `layers`; defaults: DeepSeek-V3's `moe_mlpwo`.

    Examples:
        >>> [line.nbytes / 2**30 for line in plan(show=False).lines]
        [210.0, 105.0, 78.75, 52.5]
    """
    worst = worst_case_rows(batch, ep, seq, top_k, num_experts)
    expected = expected_rows(batch, ep, seq, top_k)

    def line(strategy: str, rows: int, note: str = "", factor: float = 1.0) -> Line:
        size = buffer_bytes(rows, width, layers, capacity_factor=factor, dtype_bytes=dtype_bytes)
        return Line(strategy=strategy, rows=round(rows * factor), nbytes=size, note=note)

    lines = [
        line("worst case, a copy a layer", worst),
        line("static cap at half", worst // 2, "drops tokens past the cap: not offered"),
        *(line(f"paged stash, factor {factor:g}", expected, factor=factor) for factor in factors),
    ]
    routing = f"top-{top_k} of {num_experts}"
    title = f"batch {batch}, EP {ep}, sequence {seq:,}, {routing}, width {width:,}, {layers} layers"
    made = Plan(title=title, lines=tuple(lines))
    if show:
        print(made)
    return made


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it has to be at least 1")
