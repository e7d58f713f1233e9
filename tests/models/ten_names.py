"""What tests of a decoder's regions have in common: their names, policies that cover all pairs, the docs' table."""

import random
from itertools import combinations, product
from pathlib import Path

NAMES = [
    "attn_norm",
    "attn.qkv_linear",
    "attn.core_attn",
    "attn.attn_proj",
    "mlp_norm",
    "moe.router",
    "moe.expert_fc1",
    "moe.moe_act",
    "moe.expert_fc2",
    "moe.shared_experts",
]
MORE = ["attn.q_norm", "attn.k_norm", "attn.rope", "moe.experts"]
TABLE = Path(__file__).parents[2] / "docs" / "regions.md"
TINY = {"b": 4, "c": 1, "d": 128, "H": 4, "G": 2, "D": 32, "K": 2, "n": 64, "s": 1, "r": 2}
"""The letters of the documented figures."""


def covering(homes, seed=0):
    """Homes for all names at once, a few times, so that every pair of names has every pair of homes."""
    generator = random.Random(seed)
    missing = set(product(combinations(range(len(NAMES)), 2), product(homes, homes)))
    while missing:
        tries = [generator.choices(homes, k=len(NAMES)) for _ in range(50)]
        best = max(tries, key=lambda chosen: len(missing & pairs_of(chosen)))
        missing -= pairs_of(best)
        yield best


def pairs_of(chosen):
    return {((i, j), (chosen[i], chosen[j])) for i, j in combinations(range(len(NAMES)), 2)}


def table(letters=TINY):
    """Region, formula of what is new, and the measured figure, for each line of the table."""
    lines = [line.split(" | ") for line in TABLE.read_text().splitlines() if line.count(" | ") == 4]
    for region, _, needs, new, measured in lines[2:]:
        needs, new = (eval(cell.strip("`").replace("·", "*"), dict(letters)) for cell in (needs, new))
        yield region.removeprefix("| "), needs, new, int(measured.strip(" |"))
