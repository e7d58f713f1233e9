"""What plans promise, and whether the rows of `benchmarks.plan` keep it."""

from typing import Any

from benchmarks.harness import Claim

GRAPHED_WAYS = ("keep, graphed", "plan, graphed")
"""Rows of steps that ran as a CUDA graph."""
WAITING_WAY = "plan, each step waits"
"""Rows of plans for a loop that waits for each step."""


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """What a plan promises, over all cases; peaks count without weights and gradients, which nobody predicts."""
    planned = [row for row in rows if row["way"] == "plan" and "refused" not in row]

    def peak(row: dict[str, Any]) -> float:
        return (row["predicted_peak_bytes"] - row["held_bytes"]) / (row["peak_bytes"] - row["held_bytes"])

    claims = []
    for what, values, bar in (
        (
            "predicted peak above weights and gradients, furthest off",
            [abs(peak(r) - 1) for r in planned],
            0.03,
        ),
        ("predicted peak above weights and gradients, furthest below", [1 - peak(r) for r in planned], 0.01),
        (
            "predicted step time, furthest off",
            [abs(r["predicted_seconds"] / r["seconds"] - 1) for r in planned],
            0.05,
        ),
        (
            "predicted step time from the profile alone, furthest off",
            [abs(r["unfitted_seconds"] / r["seconds"] - 1) for r in planned],
            0.05,
        ),
        ("measured peak over the budget", [r["peak_bytes"] / r["budget_bytes"] for r in planned], 1.0),
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
            claims.append(Claim(what=what, value=row["seconds"] / min(hand), bar=1.0, better="at most"))
        if row["case"].startswith("qwen3") and row["part"] == 0.5:
            keep = next(other["seconds"] for other in others if other["way"] == "keep")
            what = f"plan for half of the bytes over keep, {row['case']}"
            claims.append(Claim(what=what, value=row["seconds"] / keep, bar=1.06, better="at most"))
    return claims + waiting_claims(rows) + graphed_claims(rows)


def waiting_claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """What a plan for a loop that waits for each step promises, over keep in such a loop."""
    keeps = {row["case"]: row for row in rows if row["way"] == "keep"}
    planned = [row for row in rows if row["way"] == WAITING_WAY and "refused" not in row]
    if not planned:
        return []
    off = [abs(row["predicted_alone_seconds"] / row["alone_seconds"] - 1) for row in planned]
    peaks = [row["peak_bytes"] / row["budget_bytes"] for row in planned]
    figures = [
        ("plan, each step waits: predicted step time, furthest off", max(off), 0.05),
        ("plan, each step waits: measured peak over the budget", max(peaks), 1.0),
    ]
    figures += [
        (
            f"plan for half of the bytes over keep, each step waits, {row['case']}",
            row["alone_seconds"] / keeps[row["case"]]["alone_seconds"],
            1.06,
        )
        for row in planned
        if row["case"].startswith("qwen3")
    ]
    return [Claim(what=what, value=value, bar=bar, better="at most") for what, value, bar in figures]


def graphed_claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """What a plan for a graph promises, over keep in a graph."""
    keeps = {row["case"]: row for row in rows if row["way"] == GRAPHED_WAYS[0]}
    ran = [row for row in rows if row["way"] == GRAPHED_WAYS[1] and "refused" not in row]
    planned = [(row, keeps[row["case"]]) for row in ran]
    if not planned:
        return []
    off = [abs(row["predicted_seconds"] / row["seconds"] - 1) for row in (*keeps.values(), *ran)]
    peaks = [row["peak_bytes"] / row["budget_bytes"] for row in ran]
    figures = [
        ("plan, graphed: predicted step time, furthest off, and of keep", max(off), 0.05),
        ("plan, graphed: measured peak over the budget", max(peaks), 1.0),
    ]
    figures += [
        (
            f"plan, graphed, for half of the bytes over keep, {row['case']}",
            row["seconds"] / keep["seconds"],
            1.06,
        )
        for row, keep in planned
        if row["case"].startswith("qwen3") and row["part"] == 0.5
    ]
    return [Claim(what=what, value=value, bar=bar, better="at most") for what, value, bar in figures]
