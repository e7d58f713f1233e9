"""What plans promise, and whether the rows of `benchmarks.plan` keep it."""

from typing import Any

from benchmarks.harness import Claim

GRAPHED_WAYS = ("keep, graphed", "plan, graphed")
"""Rows of steps that ran as a CUDA graph."""
WAITING_WAY = "plan, each step waits"
"""Rows of plans for a loop that waits for each step."""


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """What a plan promises, over all cases; peaks count without weights and gradients, which nobody predicts."""
    planned = _ran(rows, "plan")

    def peak(row: dict[str, Any]) -> float:
        return (row["predicted_peak_bytes"] - row["held_bytes"]) / (row["peak_bytes"] - row["held_bytes"])

    claims = []
    for what, values, bar in (
        (
            "predicted peak above weights and gradients, furthest off",
            [abs(peak(r) - 1) for r in planned],
            0.02,
        ),
        ("predicted peak above weights and gradients, furthest below", [1 - peak(r) for r in planned], 0.01),
        (
            "predicted step time, furthest off",
            [abs(r["predicted_seconds"] / r["seconds"] - 1) for r in planned],
            0.05,
        ),
        ("measured peak over the budget", [r["peak_bytes"] / r["budget_bytes"] for r in planned], 1.0),
        (
            "seconds to plan for 8 layers that were profiled, most",
            [r["planning_seconds"] for r in planned if "8 layers" in r["case"]],
            15.0,
        ),
    ):
        if values:
            claims.append(Claim(what=f"plan: {what}", value=max(values), bar=bar, better="at most"))
    for row in planned:
        others = [
            other
            for other in rows
            if other["case"] == row["case"] and other["way"] not in ("plan", WAITING_WAY, *GRAPHED_WAYS)
        ]
        hand = [other["seconds"] for other in others if other["peak_bytes"] <= row["budget_bytes"]]
        what = f"plan for {row['part']:g} of the bytes over the best by hand that fits, {row['case']}"
        if hand:
            claims.append(Claim(what=what, value=row["seconds"] / min(hand), bar=1.02, better="at most"))
        if row["case"].startswith("qwen3") and row["part"] == 0.5:
            keep = next(other["seconds"] for other in others if other["way"] == "keep")
            what = f"plan for half of the bytes over keep, {row['case']}"
            claims.append(Claim(what=what, value=row["seconds"] / keep, bar=1.06, better="at most"))
    return claims + waiting_claims(rows) + graphed_claims(rows)


def waiting_claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """What a plan for a loop that waits for each step promises, over keep in such a loop."""
    ran = _ran(rows, WAITING_WAY)
    off = [abs(row["predicted_alone_seconds"] / row["alone_seconds"] - 1) for row in ran]
    figures = [("predicted step time, furthest off", off, 0.05)]
    return _claims(WAITING_WAY, figures, ran, _ran(rows, "keep"), "alone_seconds")


def graphed_claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """What a plan for a graph promises, over keep in a graph."""
    keeps, ran = (_ran(rows, way) for way in GRAPHED_WAYS)
    off = [abs(row["predicted_seconds"] / row["seconds"] - 1) for row in (*keeps, *ran)]
    figures = [("predicted step time, furthest off, and of keep", off, 0.05)]
    return _claims(GRAPHED_WAYS[1], figures, ran, keeps, "seconds")


def _ran(rows: list[dict[str, Any]], way: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["way"] == way and "refused" not in row]


def _claims(
    way: str,
    figures: list[tuple[str, list[float], float]],
    planned: list[dict[str, Any]],
    keeps: list[dict[str, Any]],
    seconds: str,
) -> list[Claim]:
    """The largest of each figure, that budgets are kept, and what half of qwen3's bytes cost over keep."""
    if not planned:
        return []
    peaks = [row["peak_bytes"] / row["budget_bytes"] for row in planned]
    found = [
        Claim(what=f"{way}: {what}", value=max(values), bar=bar, better="at most")
        for what, values, bar in (*figures, ("measured peak over the budget", peaks, 1.0))
    ]
    keep = {row["case"]: row[seconds] for row in keeps}
    for row in planned:
        if row["case"].startswith("qwen3") and row["part"] == 0.5:
            what = f"{way}, for half of the bytes over keep, {row['case']}"
            value = row[seconds] / keep[row["case"]]
            found.append(Claim(what=what, value=value, bar=1.06, better="at most"))
    return found
