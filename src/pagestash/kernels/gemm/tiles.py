"""Tiles of quack's kernels, from a sweep: `python -m benchmarks.gemm_sweep`, in `results/gemm_sweep.json`.

They are fixed, and chosen by what the host knows, so that a step never searches and its bits never change: by the
product, the widest side of an expert's matrix, and how many rows an expert has on average. For every shape of the
sweep the tile chosen is within 3 % of that shape's best, and at most 2 % slower than torch.
"""

from typing import Literal, NamedTuple

CAPABILITY = (9, 0)
"""Of the GPUs that the table is for."""

Product = Literal["up_gated", "forward", "gathered", "gradient", "weights", "gathered_weights"]


class Tile(NamedTuple):
    m: int
    n: int
    pingpong: bool
    """Two warp groups with a tile each, that take turns; else both share one."""
    cluster_m: int = 2
    cluster_n: int = 1


MIDDLE, WIDE = 2560, 6400
"""From which widest side of a matrix on (Qwen3's experts: 2048; gpt-oss: 2880 and 5760; DeepSeek-V3: 7168)."""
MANY = 1536
"""Rows of an expert."""

TURNS_160, TURNS_192 = Tile(128, 160, True), Tile(128, 192, True)
SHARED_256 = Tile(128, 256, False)

NARROW_MANY: dict[Product, Tile] = {
    "up_gated": TURNS_192,
    "forward": TURNS_192,
    "gathered": SHARED_256._replace(cluster_m=1),
    "gradient": SHARED_256._replace(cluster_m=1, cluster_n=2),
    "weights": SHARED_256,
    "gathered_weights": SHARED_256,
}
NARROW_FEW: dict[Product, Tile] = {
    "up_gated": SHARED_256,
    "forward": TURNS_192._replace(cluster_m=1),
    "gathered": SHARED_256,
    "gradient": SHARED_256._replace(cluster_m=1),
    "weights": TURNS_192,
    "gathered_weights": SHARED_256,
}
MIDDLE_TILES: dict[Product, Tile] = {
    "up_gated": TURNS_192,
    "forward": TURNS_192._replace(cluster_m=1),
    "gathered": TURNS_192,
    "gradient": TURNS_192._replace(cluster_m=1),
    "weights": TURNS_192,
    "gathered_weights": TURNS_192,
}
WIDE_TILES: dict[Product, Tile] = {
    # Without "up_gated": there it gains 2 % over torch's three kernels, or loses 4.
    "forward": TURNS_192._replace(cluster_m=1, cluster_n=2),
    "gathered": SHARED_256._replace(cluster_m=1),
    "gradient": TURNS_160,
    "weights": Tile(192, 128, True),
    "gathered_weights": SHARED_256,
}


def tile_for(product: Product, rows: int, experts: int, *sides: int) -> Tile | None:
    """For a product over `rows` of `experts`, with matrices of these sides; None: better done by other kernels."""
    widest = max(sides)
    if widest >= WIDE:
        return WIDE_TILES.get(product)
    if widest >= MIDDLE:
        return MIDDLE_TILES[product]
    return (NARROW_MANY if rows >= MANY * experts else NARROW_FEW)[product]
