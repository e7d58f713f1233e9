"""The candidates of a step, and the plan that one of them is for a budget."""

from pagestash.planning.budget import notes_on
from pagestash.planning.candidates import Candidate, Problem, unbeaten
from pagestash.planning.choices import layer_of
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.planning.rank import RankPredictor, RankStep, rank_candidates
from pagestash.planning.result import NothingFits, Plan, policy_of, rows_of
from pagestash.policy import PoolConfig
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.progress import Tell, tell_nobody
from pagestash.sizes import format_bytes


def predictor_of(step: MeasuredStep) -> Predictor:
    return RankPredictor(step) if isinstance(step, RankStep) else Predictor(step)


def find_candidates(step: MeasuredStep, host_bytes: int, tell: Tell = tell_nobody) -> list[Candidate]:
    """The candidates of a step, the fastest first. They do not depend on a budget."""
    if isinstance(step, RankStep):
        return rank_candidates(step, host_bytes, tell)
    return Problem(step, host_bytes).candidates(tell)


def choose(
    step: MeasuredStep, unplanned: Prediction, limit: int, host_bytes: int, found: list[Candidate]
) -> Plan:
    """The plan for a budget: the fastest candidate that fits."""
    fitting = [item for item in found if item.predicted.peak_bytes <= limit]
    if not fitting:
        nearest = min(found, key=lambda item: item.predicted.peak_bytes)
        smallest, at = nearest.predicted, nearest.predicted.peak_at
        largest = predictor_of(step).largest_kept(RuleTable(nearest.rules, PoolConfig()), at)
        raise NothingFits(
            limit,
            smallest,
            step.where(at),
            without_host=not host_bytes,
            largest=largest,
            unplanned_bytes=unplanned.peak_bytes,
            saves_logits=_saves_logits(predictor_of(step).one.profile),
        )
    # Of plans that are as fast, the one that moves least: the link and the host may have other work.
    best = min(fitting, key=lambda item: (item.predicted.mean_seconds, item.predicted.moved_bytes))
    best = _without_idle_rules(best, step, limit, host_bytes)
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
        limit=limit_of(best.predicted, found, limit),
        notes=notes,
        curve=_curve(found),
        expected_rows=expected,
        graphed=step.graphed,
        waits=step.waits,
        recomputed_layers=profile.recomputed_layers,
    )


def _saves_logits(profile: ProfiledStep) -> bool:
    """Whether the widest saved tensor is outside all layers: a head that is fused with its loss saves no logits."""
    found = [tensor for tensor in profile.tensors if tensor.kind == "activation" and len(tensor.shape) > 1]
    widest = max(found, key=lambda tensor: tensor.shape[-1], default=None)
    return widest is not None and layer_of(widest.region) is None


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


def limit_of(best: Prediction, found: list[Candidate], budget: int) -> str:
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
