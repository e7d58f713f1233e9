"""Plans: what is predicted against what is measured, and planned policies against those that one writes by hand.

For each model a step (forward and backward, adding to gradients that are there) is profiled once and planned for
parts of its saved bytes. Then it runs under each plan, and under each policy by hand, in several rounds; after the
first without policies by hand that are far from the best. Steps follow each other, as in training: the host waits
for none. Each round has a loop of a second and more that is not timed, and another one that is: under full load a
GPU lowers its clock about once a second. A round's time is the mean of its steps. The peak is the allocator's.

The fastest round counts, because a slow moment of the host is no property of a policy. The cores of a virtual
machine may be shared: in one process the same steps were launched now in 61 ms, now in 88. So rounds go on until
the two fastest agree, of a plan and of what it is compared with, or there are `MOST_ROUNDS`; the results have all.
(They may agree on a slow host.) Meanwhile Python's garbage collector has old objects put aside (`gc.freeze`):
looking through all of them takes a quarter of a second, once in a while.

A few of the same steps are timed with a wait for the device before and after each; there, too, the fastest round
counts. One model also runs under a plan for such steps, and some as CUDA graphs, without a policy and under plans
for a graph. A graph has gradients of its own, which only a second microbatch finds in place. So a graphed step runs
eight microbatches and an optimizer (SGD). Its time is given by microbatch, without that of the optimizer alone.

Without a GPU, or quick, a tiny preset runs, and memory is counted by live storages.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import pagestash as ps
from benchmarks.harness import UnknownPreset, begun, write
from benchmarks.plan_bench import WARM, Bench
from benchmarks.plan_cases import CASES, QUICK, Case, by_hand
from benchmarks.plan_claims import GRAPHED_WAYS, WAITING_WAY, claims_of
from pagestash.garbage import old_objects_aside
from pagestash.planning import NothingFits, predict
from pagestash.planning.budget import base_bytes
from pagestash.planning.prediction import Prediction

PARTS = (0.75, 0.5, 0.35)
ROUNDS, MOST_ROUNDS = 3, 8
AGREE = 0.01
"""Rounds that differ by this part are the same."""
REPEATS = 5
CLOSE = 1.05
"""By so much slower than the best so far, a policy by hand may still be the best."""


def compare(
    case: Case, device: torch.device, *, parts: Sequence[float], rounds: tuple[int, int], repeats: int
) -> Iterator[list[dict[str, Any]]]:
    """One row for each plan and each policy by hand, then those of graphs, then of a loop that waits.

    `rounds` are the fewest and the most.
    """
    bench = Bench(case, device)
    begun = time.perf_counter()
    profile = ps.profile(bench.model, bench.batch)
    print(f"{case.name}: profiled in {time.perf_counter() - begun:.1f} s", flush=True)
    held = base_bytes(profile, 0)
    policies: list[tuple[dict[str, Any], ps.Policy]] = []
    refused: list[dict[str, Any]] = []
    row: dict[str, Any]
    for way, policy in by_hand(case, profile).items():
        row = {"case": case.name, "way": way, "held_bytes": held}
        policies.append((row | predicted(predict(profile, policy, base_bytes=held)), policy))
    for part in parts:
        row = {"case": case.name, "way": "plan", "part": part, "held_bytes": held}
        begun = time.perf_counter()
        try:
            plan = ps.plan(bench.model, bench.batch, budget=part, profile=profile)
        except NothingFits as error:
            refused.append(row | {"refused": str(error)})
            continue
        row |= {
            "planning_seconds": time.perf_counter() - begun,
            "budget_bytes": plan.budget_bytes,
            "checked_bytes": plan.measured_bytes,
            "planned_for": plan.planned_for,
            "checked_seconds": plan.measured_seconds,
            **predicted(plan.predicted),
            "rules": [f"{rule.match} {rule.home} {rule.fraction:g}" for rule in plan.policy.rules],
            "notes": list(plan.notes),
        }
        print(plan, flush=True)
        policies.append((row, plan.policy))
    with old_objects_aside():
        seen = in_rounds(policies, partial(bench.measure, repeats=repeats), *rounds)
    yield [
        row
        | {
            "seconds": min(each["seconds"] for each in found),
            "round_seconds": [each["seconds"] for each in found],
            "alone_seconds": min(each["alone_seconds"] for each in found),
            "peak_bytes": max(each["peak_bytes"] for each in found),
            "loss": found[0]["loss"],
        }
        for (row, _), found in zip(policies, seen)
    ] + refused
    if case.graphed:
        yield graphed(case, bench, profile, parts, repeats)
    if case.waiting:
        yield waiting(case, bench, profile, rounds=rounds[0], repeats=repeats)
    del bench
    gc.collect()


def waiting(
    case: Case, bench: Bench, profile: ps.Profile, *, rounds: int, repeats: int
) -> list[dict[str, Any]]:
    """The step under a plan for half of the bytes in a loop that waits for each."""
    held = base_bytes(profile, 0)
    row: dict[str, Any] = {"case": case.name, "way": WAITING_WAY, "part": 0.5, "held_bytes": held}
    bench.model.zero_grad()  # a plan restores them, and that takes seconds
    try:
        plan = ps.plan(bench.model, bench.batch, budget=0.5, profile=profile, waits=True)
    except NothingFits as error:
        return [row | {"refused": str(error)}]
    row |= {
        "budget_bytes": plan.budget_bytes,
        "predicted_alone_seconds": plan.predicted.seconds,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
    }
    row["rules"] = [f"{rule.match} {rule.home} {rule.fraction:g}" for rule in plan.policy.rules]
    found = []
    with old_objects_aside():
        for turn in range(rounds):
            found.append(bench.measure(plan.policy, repeats))
            ms = 1000 * found[-1]["alone_seconds"]
            print(f"{case.name}, {WAITING_WAY}: {ms:.1f} ms, round {turn + 1} of {rounds}", flush=True)
    return [
        row
        | {
            "alone_seconds": min(each["alone_seconds"] for each in found),
            "peak_bytes": max(each["alone_peak_bytes"] for each in found),
            "loss": found[0]["loss"],
        }
    ]


def graphed(
    case: Case, bench: Bench, profile: ps.Profile, parts: Sequence[float], repeats: int
) -> list[dict[str, Any]]:
    """The step as a CUDA graph, without a policy and under plans for a graph."""
    held = base_bytes(profile, 0)
    bench.model.zero_grad()
    base: dict[str, Any] = {"case": case.name, "way": GRAPHED_WAYS[0], "held_bytes": held}
    keep = predict(profile, ps.Policy(), base_bytes=held, graphed=True)
    policies = [(base | predicted(keep), ps.Policy())]
    rows = []
    for part in parts:
        row = base | {"way": GRAPHED_WAYS[1], "part": part}
        try:
            plan = ps.plan(bench.model, bench.batch, budget=part, profile=profile, graphed=True)
        except NothingFits as error:
            rows.append(row | {"refused": str(error)})
            continue
        row |= {"budget_bytes": plan.budget_bytes, "checked_bytes": plan.measured_bytes}
        rules = [f"{rule.match} {rule.home} {rule.fraction:g}" for rule in plan.policy.rules]
        policies.append((row | predicted(plan.predicted) | {"rules": rules}, plan.policy))
    for row, policy in policies:
        found = bench.measure_graphed(policy, repeats)
        show(row, found, "a graph")
        rows.append(
            row
            | {
                "seconds": found["seconds"],
                "peak_bytes": found["peak_bytes"],
                "loss": found["loss"],
            }
        )
    return rows


def in_rounds(
    policies: list[tuple[dict[str, Any], ps.Policy]],
    measure: Callable[[ps.Policy], dict[str, Any]],
    least: int,
    most: int,
) -> list[list[dict[str, Any]]]:
    """What was measured in each round, of each policy beside its row.

    A plan and what it is compared with run equally often: until the two fastest rounds of each agree.
    """
    rows = [row for row, _ in policies]
    seen: list[list[dict[str, Any]]] = [[] for _ in policies]
    for turn in range(most):
        wanted = set(range(len(policies)))
        if turn:
            groups = comparisons(rows, seen)
            wanted = {
                index
                for group in groups
                if turn < least or not all(agree(seen[index]) for index in group)
                for index in group
            }
        for index in sorted(wanted):
            row, policy = policies[index]
            seen[index].append(measure(policy))
            show(row, seen[index][-1], f"round {turn + 1}")
    return seen


def comparisons(rows: list[dict[str, Any]], seen: list[list[dict[str, Any]]]) -> list[set[int]]:
    """Rows that claims compare: keep, and each plan with what may be the fastest by hand within its budget.

    By its prediction, too: a host may have been slow in all rounds so far.
    """
    seconds = [
        min(row["predicted_seconds"], *(each["seconds"] for each in found)) for row, found in zip(rows, seen)
    ]
    found = [{index} for index, row in enumerate(rows) if row["way"] == "keep"]
    for index, row in enumerate(rows):
        if row["way"] == "plan":
            fitting = [
                at
                for at, other in enumerate(rows)
                if other["way"] != "plan" and seen[at][0]["peak_bytes"] <= row["budget_bytes"]
            ]
            best = min((seconds[at] for at in fitting), default=0.0)
            found.append({index, *(at for at in fitting if seconds[at] <= CLOSE * best)})
    return found


def agree(found: list[dict[str, Any]]) -> bool:
    """Whether the two fastest rounds took the same."""
    fastest, *others = sorted(each["seconds"] for each in found)
    return bool(others) and others[0] <= (1 + AGREE) * fastest


def predicted(prediction: Prediction) -> dict[str, Any]:
    return {"predicted_seconds": prediction.seconds, "predicted_peak_bytes": prediction.peak_bytes}


def show(row: dict[str, Any], measured: dict[str, Any], when: str) -> None:
    """One line of progress: milliseconds and GiB above weights and gradients, and what was predicted of them."""
    ms, above = 1000 * measured["seconds"], measured["peak_bytes"] - row["held_bytes"]
    line = f"{row['case']}, {row['way']} {row.get('part', '')}: {ms:.1f} ms, {above / (1 << 30):.2f} GiB"
    peak = row["predicted_peak_bytes"] - row["held_bytes"]
    line += f" (predicted {1000 * row['predicted_seconds']:.1f} ms, {peak / (1 << 30):.2f} GiB)"
    print(f"{line}, {when}", flush=True)


def run(
    out: Path | None = None,
    quick: bool = False,
    resume: bool = False,
    models: int | None = None,
    only: str | None = None,
    parts: Sequence[float] = PARTS,
) -> Path:
    """All models, and a file after each part of one, because a run of minutes may be cut off.

    `resume` goes on behind the models that are whole. `models`: so many at most. With `only` one preset, or other
    `parts` of the bytes, the file is `plan_part`.
    """
    cuda = torch.cuda.is_available()
    every = CASES if cuda and not quick else QUICK
    cases = [case for case in every if only in (None, case.preset)]
    if not cases:
        raise UnknownPreset(f"{only!r}: expected one of {', '.join(case.preset for case in every)}")
    name = "plan" if only is None and tuple(parts) == PARTS else "plan_part"
    device = torch.device("cuda" if cuda else "cpu")
    rounds, repeats = ((1, 1), 1) if quick else ((ROUNDS, MOST_ROUNDS), REPEATS)
    config = {"parts": parts, "warm": WARM, "rounds": rounds, "repeats": repeats, "quick": quick}
    config |= {} if only is None else {"only": only}
    found = begun(name, config=config, out=out) if resume else []
    rows = [row for case in cases if is_whole(case, found) for row in found if row["case"] == case.name]
    for case in [case for case in cases if not is_whole(case, rows)][:models]:
        for some in compare(case, device, parts=parts, rounds=rounds, repeats=repeats):
            rows += some
            _write(name, config, rows, out)
    return _write(name, config, rows, out)


def _write(name: str, config: dict[str, Any], rows: list[dict[str, Any]], out: Path | None) -> Path:
    """The result, whose claims say so if it is not of the whole benchmark."""
    claims = claims_of(rows)
    if name != "plan":
        claims = [replace(claim, what=f"{claim.what} (measured apart)") for claim in claims]
    return write(name, config=config, rows=rows, claims=claims, out=out)


def is_whole(case: Case, rows: list[dict[str, Any]]) -> bool:
    """Whether the rows have all of a model's."""
    ways = {row["way"] for row in rows if row["case"] == case.name}
    wanted = [(True, "plan"), (case.graphed, GRAPHED_WAYS[1]), (case.waiting, WAITING_WAY)]
    return all(way in ways for there, way in wanted if there)
