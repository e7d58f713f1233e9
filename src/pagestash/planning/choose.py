"""The candidates of a step, and the plan that one of them is for a budget."""

from collections.abc import Sequence
from dataclasses import replace

from pagestash.planning.budget import notes_on
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.planning.problem import Candidate, Problem, unbeaten
from pagestash.planning.rank import RankPredictor, RankStep, rank_candidates
from pagestash.planning.result import NothingFits, Plan, policy_of, rows_of
from pagestash.planning.solve import candidates
from pagestash.policy import PoolConfig, Rule
from pagestash.sizes import format_bytes

Candidates = tuple[list[Candidate], bool]
"""The fastest first, and whether they were solved for."""
LIKELY = 80
"""So many of the fastest that fit: one of them may be the plan for a step that differs a little."""
GREEDY = "without scipy the plan is found greedily"
"""How a note about that begins."""


def predictor_of(step: MeasuredStep) -> Predictor:
    return RankPredictor(step) if isinstance(step, RankStep) else Predictor(step)


def find_candidates(step: MeasuredStep, host_bytes: int, predictor: Predictor | None = None) -> Candidates:
    """The candidates of a step, which do not depend on a budget."""
    if isinstance(step, RankStep):
        return rank_candidates(step, host_bytes)
    problem = Problem(step, host_bytes, predictor=predictor)
    return candidates(problem), problem.exact


def predicted_again(step: MeasuredStep, searched: Sequence[Candidates], limit: int) -> Candidates:
    """Of what searches have found, what may be the plan for a budget and what nothing beats, predicted by `step`.

    Far fewer predictions than a search takes, for a step that differs from theirs in what a keeper costs its host.
    """
    predictor = predictor_of(step)
    likely: dict[frozenset[tuple[str, Rule]], dict[str, Rule]] = {}
    for found, _ in searched:
        fitting = [item for item in found if item.predicted.peak_bytes <= limit]
        for item in (*fitting[:LIKELY], *unbeaten(found)):
            likely.setdefault(frozenset(item.rules.items()), item.rules)
    again = [Candidate(rules, predictor.predict(RuleTable(rules, PoolConfig()))) for rules in likely.values()]
    again.sort(key=lambda item: (item.predicted.mean_seconds, item.predicted.peak_bytes))
    return again, all(exact for _, exact in searched)


def told_by(plan: Plan, candidates: Candidates) -> Plan:
    """The plan with what these say of others: its limit, its curve, and how far a greedy one may be off."""
    found, exact = candidates
    notes = [note for note in plan.notes if not note.startswith(GREEDY)]
    notes += [] if exact else [_greedy_note(plan.predicted, plan.unplanned)]
    return replace(
        plan, limit=_limit(plan.predicted, found, plan.budget_bytes), notes=notes, curve=_curve(found)
    )


def choose(
    step: MeasuredStep, unplanned: Prediction, limit: int, host_bytes: int, candidates: Candidates
) -> Plan:
    """The plan for a budget: the fastest candidate that fits."""
    found, exact = candidates
    fitting = [item for item in found if item.predicted.peak_bytes <= limit]
    if not fitting:
        nearest = min(found, key=lambda item: item.predicted.peak_bytes)
        smallest, at = nearest.predicted, nearest.predicted.peak_at
        largest = predictor_of(step).largest_kept(RuleTable(nearest.rules, PoolConfig()), at)
        raise NothingFits(limit, smallest, step.where(at), without_host=not host_bytes, largest=largest)
    best = _without_idle_rules(fitting[0], step, limit, host_bytes)
    one = step.one if isinstance(step, RankStep) else step
    profile = one.profile
    policy = policy_of(best.rules, profile.regions)
    notes = notes_on(profile, loops=step.loops)
    link = profile.link
    if best.predicted.moved_bytes and not link.measured:
        rates = f"{link.out / 1e9:g} GB/s out, {link.back / 1e9:g} GB/s back"
        notes.append(f"the link was not measured: {rates} are assumed")
    if isinstance(step, RankStep):
        notes.append("bytes and times of regions are those of one microbatch")
    expected = None
    if step.skew is not None:
        policy, expected = step.skew.apply(policy, best.predicted.pool, step.rows)
        notes += step.skew.notes(best.predicted.pool, step.rows)
    if not exact:
        notes.append(_greedy_note(best.predicted, unplanned))
    measured = sum(segment.seconds for segment in profile.segments)
    return Plan(
        policy=policy,
        predicted=best.predicted,
        unplanned=unplanned,
        budget_bytes=limit,
        turn=step.turn,
        rows=rows_of(
            policy,
            profile,
            sum(one.seconds) / measured if measured else 1.0,
            None if isinstance(step, RankStep) else best.predicted.leaving,
        ),
        limit=_limit(best.predicted, found, limit),
        notes=notes,
        curve=_curve(found),
        expected_rows=expected,
        graphed=step.graphed,
        waits=step.waits,
    )


def _without_idle_rules(best: Candidate, step: MeasuredStep, limit: int, host_bytes: int) -> Candidate:
    """The candidate without rules that move nothing, of which a keeper would warn.

    It may need one all the same: what stays under it is why others leave. This is done for each budget alone. So a
    plan for more memory may be slower by what the hooks of such rules cost; in recorded steps none was.
    """
    predictor = predictor_of(step)
    while True:
        before = best
        for rule in policy_of(best.rules, predictor.one.profile.regions).rules:
            names = {name for name in best.rules if rule.matches(name)}
            if rule.home != "offload" or names & best.predicted.moving:
                continue
            rules = {name: own for name, own in best.rules.items() if name not in names}
            found = predictor.predict(RuleTable(rules, PoolConfig()))
            fits = found.peak_bytes <= limit and found.host_bytes <= host_bytes
            if fits and found.mean_seconds <= best.predicted.mean_seconds:
                best = Candidate(rules, found)
        if best is before:
            return best


def _greedy_note(best: Prediction, unplanned: Prediction) -> str:
    off = best.mean_seconds - unplanned.mean_seconds
    return f"{GREEDY}; it is at most {1e3 * off:.2f} ms slower than the best (pip install 'pagestash[plan]')"


def _limit(best: Prediction, found: list[Candidate], budget: int) -> str:
    """What keeps the plan from being faster."""
    above = [item.predicted for item in found if item.predicted.peak_bytes > budget]
    faster = [other for other in above if other.mean_seconds < best.mean_seconds]
    if not faster:
        return "none: no faster plan was found"
    nearest = min(faster, key=lambda item: item.peak_bytes)
    what = "the link" if best.wait_seconds > best.recompute_seconds else "memory"
    more = format_bytes(nearest.peak_bytes - budget)
    return f"{what}: with {more} more, {1e3 * (best.mean_seconds - nearest.mean_seconds):.2f} ms less"


def _curve(found: list[Candidate]) -> list[tuple[int, float]]:
    """Peaks and seconds, from the fastest to the smallest."""
    return [(item.predicted.peak_bytes, item.predicted.seconds) for item in unbeaten(found)]
