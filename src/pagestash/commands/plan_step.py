"""`pagestash plan` for a step that is measured here, or was."""

from dataclasses import fields, replace

from pagestash.commands.checks import check_file, check_numbers, check_picture
from pagestash.commands.options import MeasuredOptions, PlanOptions
from pagestash.commands.partition import MOST_ACTIONS
from pagestash.commands.show import note, show
from pagestash.commands.step import given_link, measure
from pagestash.device import find_device
from pagestash.pipeline.planned import PipelinePlan, plan_pipeline
from pagestash.planning.budget import check_budget, parse_host
from pagestash.planning.make import plan_profile
from pagestash.planning.result import Plan
from pagestash.planning.skew import Rows, row_distribution
from pagestash.policy import OVERFLOW
from pagestash.profiling.result import Profile
from pagestash.profiling.steps import RepeatedStep
from pagestash.row_counts.tokens_per_expert import read_tokens_per_expert
from pagestash.schedules.plan import schedule_name

OPTIMIZERS = {"none": 0, "sgd": 0, "momentum": 1, "adamw": 2}
"""State tensors of each parameter, of its dtype."""
SCHEDULE = "1F1B"


def run(options: PlanOptions) -> None:
    """Plan and print. A budget that nothing fits is bad input."""
    if options.pp is not None:
        pipeline = _plan_pipeline(options)
        show(pipeline)
        if options.out is not None:
            pipeline.save(options.out)
        return
    for name in ("microbatches", "schedule"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} is for a pipeline: pass --pp, too")
    found = _plan(options)
    show(found)
    if options.out is not None:
        found.policy.save(options.out)
    if options.curve is not None:
        found.plot_curve(options.curve)
    if options.plot is not None:
        found.plot_memory(options.plot)


def _plan_pipeline(options: PlanOptions) -> PipelinePlan:
    for name in ("rows", "skew", "overflow", "curve", "plot"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} is for a plan of one rank: pass no --pp beside it")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out}: expected a folder, for one policy a rank")
    if options.graphed:
        raise ValueError("--graphed is for a plan of one rank: pass no --pp beside it")
    check_numbers(pp=options.pp, microbatches=options.microbatches)
    assert options.pp is not None
    if options.pp * (options.microbatches or 1) > MOST_ACTIONS:
        raise ValueError(
            f"--microbatches {options.microbatches}: expected at most {MOST_ACTIONS // options.pp}"
        )
    schedule = options.schedule or SCHEDULE
    schedule_name(schedule)  # refuses what is none before anything is measured
    state = _state(options)
    _check_memory(options)
    profile, _ = _profile(options)
    found = plan_pipeline(
        profile,
        schedule=schedule,
        ranks=options.pp,
        microbatches=options.microbatches,
        budget=_budget(options),
        host=_host(options, profile),
        optimizer_bytes=state * profile.gradient_bytes,
    )
    _note_host(options, profile)
    return found


def _state(options: PlanOptions) -> int:
    if options.optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer {options.optimizer}: expected one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[options.optimizer]


def _budget(options: PlanOptions) -> str | int:
    text = options.budget or ""
    return int(text) if text.isdecimal() else text


def _check_memory(options: PlanOptions) -> None:
    """Refuse a wrong budget before anything is measured."""
    name = options.device
    device = find_device(name, f"--device {name}") if options.profile is None else None
    check_budget(_budget(options), None if device is None else str(device))
    parse_host(options.host)


def _plan(options: PlanOptions) -> Plan:
    state = _state(options)
    check_file("--out", options.out)
    check_picture("--curve", options.curve)
    check_picture("--plot", options.plot)
    rows = _rows(options)
    _check_memory(options)
    profile, step = _profile(options)
    found = plan_profile(
        profile,
        budget=_budget(options),
        host=_host(options, profile),
        optimizer_bytes=state * profile.gradient_bytes,
        rows=rows,
        overflow=OVERFLOW if options.overflow is None else options.overflow,
        check=step,
        graphed=options.graphed,
        waits=options.waits,
        progress=True,
    )
    _note_host(options, profile)
    return found


def _host(options: PlanOptions, profile: Profile) -> str | int:
    """None for a step that was measured on a CPU, unless a link or host memory is given."""
    return 0 if _is_without_link(options, profile) else options.host


def _is_without_link(options: PlanOptions, profile: Profile) -> bool:
    return profile.device == "cpu" and options.link is None and options.host == "auto"


def _note_host(options: PlanOptions, profile: Profile) -> None:
    if _is_without_link(options, profile):
        note("a CPU has no link to other memory: nothing is offloaded (--link 50GB plans as for a GPU)")


def _rows(options: PlanOptions) -> Rows | None:
    if options.rows is not None and options.skew is not None:
        raise ValueError("--rows and --skew both say how rows vary: expected one of them")
    if options.overflow is not None and options.rows is None and options.skew is None:
        raise ValueError(
            f"--overflow {options.overflow:g}: pass --rows or --skew, too, which say how rows vary"
        )
    if options.rows not in (None, "measured"):
        return read_tokens_per_expert(options.rows, ep=options.ep or 1)
    if options.ep is not None:
        raise ValueError(f"--ep {options.ep}: it divides the experts of a --rows file, and there is none")
    return options.rows if options.skew is None else row_distribution(options.skew)


def _profile(options: PlanOptions) -> tuple[Profile, RepeatedStep | None]:
    """The profile, and the step if it was measured now."""
    if options.profile is None:
        return measure(options)
    for each in fields(MeasuredOptions):
        if each.name != "link" and getattr(options, each.name) != each.default:
            raise ValueError(f"--profile has the measured step: pass no --{each.name} beside it")
    rate = given_link(options)
    profile = Profile.load(options.profile)
    if rate is not None:
        profile = replace(profile, link=replace(profile.link, out=rate, back=rate, measured=False))
    return profile, None
