"""`ps.verify`: run steps with and without a policy from the same state, and compare all that they compute."""

import math
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from pagestash.planning.budget import check_step
from pagestash.policy import Policy, Rule
from pagestash.profiling.measure import Loss, repeated_step
from pagestash.saved.names import named_modules
from pagestash.verifying.compare import Copies, Digests, Distance, Distances
from pagestash.verifying.result import Difference, Spread, Verification
from pagestash.verifying.runs import Key, Runs, See

RegionRule = tuple[str, Rule]
"""A region and its rule."""


def verify(
    model: nn.Module,
    batch: torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any],
    policy: Policy | Sequence[Rule] | str | Path,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 3,
    autocast: torch.dtype | None = None,
    regions: Sequence[str] = (),
    graphed: bool = False,
    backend: str = "auto",
) -> Verification:
    """Whether steps under `policy` compute what steps without it compute, to the last bit.

        report = ps.verify(model, batch, policy, optimizer=optimizer)
        print(report)
        assert report.equal

    Runs `steps` steps twice without the policy and once with it, from the same weights, optimizer state, buffers,
    attributes and random states. Each begins without gradients. Compares each step's loss, gradients, parameters,
    buffers, optimizer state and random states, and at the end attributes. The first result that differs is
    reported, with its rule and region, which are found by runs under parts of the policy. An error that only steps
    under the policy raise is a result, too. Three steps are enough for all that a keeper does: it measures in the
    first, moves by what it measured from the second on, and in a `GraphedStep` the third is the first replay.

    `policy` may be its rules or its file, too. `batch`, `loss` and `autocast` are those of `ps.profile`, `regions`
    and `backend` those of `Keeper.attach` and `Keeper`. Without an `optimizer` no weight changes. With
    `graphed=True` all runs are CUDA graphs.

    If the two plain runs differ, all is done again with torch's deterministic algorithms. If they still differ, the
    report has the first result that does, and compares the policy's results with the spread of the plain ones.

    Afterwards the model, the optimizer and random states are as they were, also after an exception. That takes a
    second copy of weights, gradients and optimizer state, on the host if the device has no room.

    With `torch.distributed` all ranks call it, and hear of the same difference. As in training, an error on one
    rank leaves the others waiting, and DDP or FSDP2 cannot be used after an exception in backward.
    """
    policy = Policy.of(policy)
    if steps < 1:
        raise ValueError(f"steps={steps}: expected at least 1")
    check_step(loss, optimizer)
    step = repeated_step(model, batch, loss=loss, autocast=autocast)
    if graphed and step.device.type != "cuda":
        raise ValueError(f"graphed=True: a CUDA graph needs a model on a GPU, this one is on {step.device}")
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise ValueError("the model has lazy parameters, which its first step makes: run a forward before")
    return _Verify(Runs(step, optimizer, steps, graphed, tuple(regions), backend), policy).report()


class _Verify:
    def __init__(self, runs: Runs, policy: Policy) -> None:
        self._runs = runs
        self._policy = policy
        self._state = runs.state()
        self._plain = Digests()
        self._broken = False
        """A step was refused on several ranks: DDP and FSDP2 cannot run another after an exception in backward."""
        self._ignored: set[Key] = set()
        """Results that differ between plain runs, and that no policy could keep: a time in an attribute."""

    def report(self) -> Verification:
        with ExitStack() as stack:
            stack.callback(self._state.put_back)
            operations: set[str] = set()
            unsteady = self._run_plain()
            deterministic = unsteady is not None
            if deterministic:
                stack.enter_context(_deterministic_algorithms(operations))
                unsteady = self._run_plain()
            results = sum(map(len, self._plain.of.values()))
            if unsteady is not None:
                self._ignore(key for key in self._plain.of if key.kind != "random state")
            found, moved, refused = self._under(self._policy)
            report = Verification(
                steps=self._runs.steps,
                results=results,
                moved=moved,
                refused=refused,
                difference=found,
                deterministic=deterministic,
                unsteady=unsteady,
            )
            if found is not None:
                report = self._locate(report, found)
            elif unsteady is not None and refused is None:
                report = self._compare_spread(report)
            return replace(report, operations=tuple(sorted(operations)))

    # --- runs; all ranks hear of each what the others found ---

    def _run(self, policy: Policy | None, see: See) -> dict[str, int]:
        self._state.put_back()
        return self._runs.run(policy, see)

    def _run_plain(self) -> Key | None:
        """Run twice without the policy; the first result that differs."""
        self._ignored = set()
        self._plain, second = Digests(), Digests()
        for digests in (self._plain, second):
            error = None
            try:
                self._run(None, digests)
            except Exception as own:
                error = own
            errors = _of_all_ranks(None if error is None else _text(error))
            if error is not None:
                raise error
            if any(errors):
                raise RuntimeError(f"without the policy, another rank: {next(filter(None, errors))}")
        self._ignore(
            key
            for key, own in self._plain.of.items()
            if key.kind in ("attribute", "random state") and second.of.get(key) != own
        )
        found = _of_all_ranks(self._plain.first_difference(second, self._ignored))
        return next(filter(None, found), None)

    def _ignore(self, keys: Iterable[Key]) -> None:
        self._ignored |= set(keys)

    def _under(self, policy: Policy) -> tuple[Difference | None, dict[str, int], str | None]:
        """Run under a policy: the first difference from the plain runs on any rank, what moved, and any error."""
        seen, moved, error, found = Digests(), {}, None, None
        try:
            moved = self._run(policy, seen)
        except Exception as own:
            error = _text(own)
        else:
            found = self._plain.first_difference(seen, self._ignored)
        ranks = _of_all_ranks((found, self._plain.place(found), error))
        errors = [error for *_, error in ranks if error is not None]
        differing = [(place, rank, key) for rank, (key, place, _) in enumerate(ranks) if key is not None]
        self._broken |= bool(errors) and len(ranks) > 1
        if errors or not differing:
            return None, moved, errors[0] if errors else None
        _, rank, key = min(differing)
        return Difference(key, rank if len(ranks) > 1 else None), moved, None

    # --- where it differs ---

    def _locate(self, report: Verification, found: Difference) -> Verification:
        """The distance, and the rules and regions that the difference needs."""
        copies = Copies(lambda key: key == found.key and key.kind != "random state")
        self._run(None, copies)
        distances = self._distances(self._policy, copies)
        distance = _of_all_ranks(distances.get(found.key))[found.rank or 0]
        if distance is not None and not distance.count:
            distance = None
            report = replace(
                report, notes=("it did not differ again when the same steps were run once more",)
            )

        def differs(places: list[RegionRule]) -> bool:
            difference, _, refused = self._under(_part(self._policy, places))
            return difference is not None or refused is not None

        return self._narrow(replace(report, difference=replace(found, distance=distance)), differs)

    def _compare_spread(self, report: Verification) -> Verification:
        """Of a model whose plain runs differ: whether the policy's results are within their spread."""
        copies = Copies(lambda _: True)
        self._run(None, copies)
        plain = [self._distances(None, copies) for _ in range(2)]

        def spread(policy: Policy) -> Spread:
            found = _of_all_ranks(_furthest(copies, plain, self._distances(policy, copies)))
            return max(found, key=lambda each: (not each.within, each.policy / (each.plain or 1.0)))

        found = spread(self._policy)
        report = replace(report, spread=found)
        if found.within:
            return report
        report = replace(report, difference=Difference(found.key))
        return self._narrow(report, lambda places: not spread(_part(self._policy, places)).within)

    def _distances(self, policy: Policy | None, copies: Copies) -> dict[Key, Distance]:
        distances = Distances(copies)
        with suppress(Exception):  # of a step that is refused now and then
            self._run(policy, distances)
        return distances.of

    def _narrow(self, report: Verification, differs: Callable[[list[RegionRule]], bool]) -> Verification:
        """Find the fewest regions that make the difference: those of one rule, then half by half."""
        names = dict.fromkeys([*named_modules(self._runs.step.model), *self._runs.regions])
        places = [(name, rule) for name in names if (rule := self._policy.rule_for(name)) is not None]
        parts = [[place for place in places if place[1] is rule] for rule in self._policy.rules]
        while True:
            alone = next((part for part in parts if part and (part == places or differs(part))), None)
            if alone is None:
                break  # no part of them by itself
            places = alone
            if len(places) == 1 or self._broken:
                break
            half = len(places) // 2
            parts = [places[:half], places[half:]]
        return replace(
            report,
            rules=tuple(dict.fromkeys(rule for _, rule in places)),
            regions=tuple(name for name, _ in places),
        )


def _part(policy: Policy, places: Sequence[RegionRule]) -> Policy:
    """The policy for these regions alone."""
    return replace(policy, rules=[replace(rule, match=name) for name, rule in places])


def _furthest(
    copies: Copies, plain: Sequence[Mapping[Key, Distance]], policy: Mapping[Key, Distance]
) -> Spread:
    """The result that the policy moves furthest, in parts of what plain runs do there, or in most tensors."""
    own = {key: max(each[key].order if key in each else math.inf for each in plain) for key in copies.of}
    usual = statistics.median([each for each in own.values() if each] or [0.0])
    spreads = [
        Spread(key, max(own[key], usual), policy[key].order if key in policy else math.inf)
        for key in copies.of
    ]
    return max(spreads, key=lambda each: each.policy / each.plain if each.plain else each.policy)


@contextmanager
def _deterministic_algorithms(operations: set[str]) -> Iterator[None]:
    """Torch's deterministic algorithms are used inside; `operations` are the names of those that have none."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    of_memory: Any = torch.utils.deterministic
    filled = of_memory.fill_uninitialized_memory
    show = warnings.showwarning

    def note(message: Warning | str, *where: Any) -> None:
        named = re.match(r"(\S+) does not have a deterministic implementation", str(message))
        if named is None:
            show(message, *where)
        else:
            operations.add(named[1])

    with warnings.catch_warnings():
        warnings.filterwarnings("always", ".*deterministic")
        warnings.showwarning = note  # type: ignore[assignment]
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cudnn.benchmark = False
            of_memory.fill_uninitialized_memory = False  # it would hide what is read of such memory
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=only_warned)
            torch.backends.cudnn.benchmark = benchmark
            of_memory.fill_uninitialized_memory = filled


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _of_all_ranks(value: Any) -> list[Any]:
    """What each rank of `torch.distributed` has; this one's alone where there are no others."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
