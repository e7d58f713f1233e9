"""`ps.Keeper`: a keeper for a policy, or for a budget, for which it plans a policy after its first step.

The first step recomputes all layers, so that it finds memory, and its first call of the model is noted. When the
next step begins, that call is measured and planned for, and the policy takes effect. Measuring the caller's own
steps instead would have to record and time in them: a profile takes several runs of one batch from the same state,
and no step of the caller's is like another.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast, overload

import torch
from torch import nn

from pagestash.policy import Policy, Rule
from pagestash.saved import keeper as saved
from pagestash.saved.expected_rows import AutoRows
from pagestash.saved.first_call import FirstCall
from pagestash.saved.received_rows import decides_after, reads_after
from pagestash.saved.stats import KeeperStats
from pagestash.saved.streams import capturing
from pagestash.sizes import format_bytes

if TYPE_CHECKING:
    from pagestash.planning.measure import Measuring
    from pagestash.planning.result import Plan
    from pagestash.planning.target import Target
    from pagestash.profiling.measure import Loss
    from pagestash.profiling.progress import Progress

log = logging.getLogger("pagestash")

WATCHED = 2
"""Planned steps whose peak is compared with the budget: the first one is measured, the second goes by its plan."""


@dataclass(slots=True)
class PlannedPeak:
    """The peak of the first planned steps on a GPU: one that exceeds the budget warns."""

    plan: "Plan"
    device: torch.device
    left: int = WATCHED

    @classmethod
    def of(cls, plan: "Plan", device: torch.device | None) -> "PlannedPeak | None":
        if device is None or device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(device)
        return cls(plan, device)

    def step_over(self) -> bool:
        """Whether to go on watching."""
        over = torch.cuda.max_memory_allocated(self.device) - self.plan.budget_bytes
        if over > 0:
            warnings.warn(self.plan.broken(over), stacklevel=4)
        self.left -= 1
        return over <= 0 and self.left > 0


class Keeper(saved.Keeper):
    """Gives the saved tensors of a model's regions the homes that a policy names.

        keeper = Keeper(Policy(rules=[Rule("layers.*.moe.experts", "stash")])).attach(model)
        with keeper.step():
            loss = model(batch)
            loss.backward()

    The file of a policy does as well (`Keeper("policy.toml")`), a list of rules, and a plan (`Keeper(plan)`).

    Results are the same to the last bit with and without a keeper. With `pool.device = "auto"` the first step that
    stashes anything is measured, which waits for the device; the pool is made when it ends.

    A module under a stash rule that has `use_pool(pool, account)` is given the pool, to write pages from its own
    kernels (`pagestash.moe` does). A module under a recompute rule that has `use_recompute(on)` recomputes by
    itself; of any other module, `forward` is run again.

    `check`: whether eager steps look for gradients that reach rows which `ps.rows` let go, and compare recomputed
    values, and raise. None: in the first step that has any; True: in every step, which waits for the device; it
    also counts what is kept where nothing moves. False: never look for such gradients.

        keeper = Keeper(budget="40GiB", optimizer=optimizer).attach(model)

    With a `budget` instead of a policy, the keeper plans one: the first step recomputes all layers, and when the
    second begins, the first call of the model is measured and planned for, as `ps.plan` does, which takes `loss`,
    `optimizer`, `host`, `repeats`, `progress`, `measure`, `graphed` (for a `GraphedStep`) and `waits` (for a loop
    that waits for the device before each step). Gradients count as held if a forward of the first step finds any.
    Gradients, buffers, random states and weights that forward writes to are restored afterwards. The policy holds
    from the second step on, whatever batches come. The second step raises `NothingFits` if no policy fits; steps
    after that run without one. On a GPU a warning says by how much the first planned steps exceed the budget.

    Several ranks plan together, and get the same policy: each has a keeper with a budget, and they measure and plan
    when their second step begins.
    """

    plan: "Plan | None" = None
    """What was planned for the budget, or given; None before, and with a given policy."""
    _target: "Target | None" = None

    @overload
    def __init__(
        self,
        policy: "Policy | Sequence[Rule] | str | Path | Plan",
        *,
        backend: str = "auto",
        check: bool | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        *,
        budget: str | float,
        loss: "Loss | None" = None,
        optimizer: torch.optim.Optimizer | None = None,
        host: str | int = "auto",
        repeats: int = 3,
        progress: "Progress" = None,
        measure: "Measuring" = "auto",
        graphed: bool = False,
        waits: bool = False,
        backend: str = "auto",
        check: bool | None = None,
    ) -> None: ...

    def __init__(
        self,
        policy: "Policy | Sequence[Rule] | str | Path | Plan | None" = None,
        *,
        budget: str | float | None = None,
        backend: str = "auto",
        check: bool | None = None,
        **measure: Any,
    ) -> None:
        if (policy is None) == (budget is None):
            raise TypeError("Keeper: expected a policy, or budget= to plan one for")
        if budget is None and measure:
            raise TypeError(f"Keeper: {next(iter(measure))}= belongs to budget=")
        self._opened: list[str] = []
        """Regions of a plan that are no modules."""
        if isinstance(getattr(policy, "policy", None), Policy):
            self.plan = plan = cast("Plan", policy)
            self._opened, policy = list(plan.regions), plan.policy
        self._forget_rows()
        given = (
            Policy() if policy is None else Policy.of(cast("Policy | Sequence[Rule] | str | Path", policy))
        )
        super().__init__(given, backend=backend, check=check)
        self._first: FirstCall | None = None
        """Until there is a plan."""
        self._peak: PlannedPeak | None = None
        """Watches the first planned steps."""
        if budget is not None:
            # Here, because it takes a third of a second to import, and most keepers have a policy.
            from pagestash.planning.target import Target

            self._target = Target(budget, **measure)

    @property
    def awaits_plan(self) -> bool:
        """Whether it has a budget, and has not planned for it yet."""
        return self._target is not None and self.plan is None

    def attach(self, model: nn.Module, regions: Sequence[str] = (), *, others: Sequence[str] = ()) -> Self:
        """Watch the modules of `model` that a rule names; `regions` are the names that `ps.region` will open.

        `others` are the modules of other stages, where `model` is a part of a larger one: a rule may match only
        these. A keeper with a budget has one model, and finds the regions itself.
        """
        ahead = self.awaits_plan
        if self._target is not None and ahead:
            if self._first is not None and self._first.model is not model:
                raise ValueError("Keeper(budget=...) plans for one model; make a keeper for each")
            self._target.check(model)
        if self._target is not None and ahead and self._first is None:
            self._begin_unplanned(self._target, model, regions)
        else:
            super().attach(model, [*regions, *self._opened], others=others)
        if self._auto_rows is None or not self._auto_rows.chosen:
            self._forget_rows()  # there may be more layers now
        if ahead:
            self._first = FirstCall(model, regions, self._regions)
        return self

    def detach(self) -> None:
        """Take all hooks off. What is stashed stays until backward has asked for it.

        The pool and pinned memory end with the last reference to the keeper, if no backward is still to come.
        """
        super().detach()
        if self._auto_rows is not None:
            self._auto_rows.forget()
            self._forget_rows()
        if self._first is not None:
            self._first.remove()
            self._first = None

    def follow(self, schedule: Any) -> Any:
        """Read ahead in a pipeline schedule; `remove()` what this returns to stop.

            schedule = ScheduleDualPipeV(stages, microbatches, loss_fn=loss)
            keeper.follow(schedule)                 # and every other schedule of the same stages
            with keeper.step():
                schedule.step(tokens)

        Offload then knows from the schedule's plan which stage and microbatch comes next: what to fetch ahead, and
        what stays because its backward follows at once. Schedules of the same stages may have different numbers of
        microbatches. Raises `ValueError` for a schedule that cannot be followed, and for a keeper with a budget.
        """
        if self._target is not None:
            from pagestash.planning.target import ONE_FORWARD

            raise ValueError(ONE_FORWARD)
        return super().follow(schedule)

    @contextmanager
    def step(self, *, check: bool = True) -> Iterator[None]:
        """One forward and backward, or several.

        A group that finds no page stays where it is, and the pool grows at the end. With `[pool] on_overflow =
        "raise"` it comes back as zeros instead, and the end raises `PoolOverflow`, on all ranks of
        `torch.distributed`: they must have the same number of steps. With `check=False` the end does not look; the
        caller feeds `keeper.overflow` to the optimizer, as `GraphedStep` does.

        With a budget, the second step begins with measuring and planning.
        """
        first = self._first
        if first is not None and capturing():
            raise RuntimeError(
                "Keeper(budget=...) has no plan yet: the first step is noted, the second runs under a plan and is "
                "measured, and the third can be captured; GraphedStep(warmup=2) or more"
            )
        if first is not None and first.over and torch.is_grad_enabled():
            self._make_plan(first)
            first = None
        with nullcontext() if first is None else first.step(), super().step(check=check), self._counted():
            yield
        if self._peak is not None and not self._peak.step_over():
            self._peak = None

    # --- expected rows ---

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """In the first steps, record what waits for the rows that layers receive."""
        rows = self._rows()
        if rows is None or capturing():
            self._captured = rows is not None
            yield
            return
        rows.begin()
        failed = True
        try:
            yield
            failed = False
        finally:
            rows.end(failed=failed)

    def _forget_rows(self) -> None:
        self.rows = None
        self._auto_rows: AutoRows | None = None
        self._looked = False
        self._captured = False
        self._steps = 0
        """Eager ones, since there is a number of expected rows."""

    def _rows(self) -> "AutoRows | None":
        """Who chooses expected rows, if any layer has left that to us."""
        if self._auto_rows is None and not self._looked:
            self._looked = True
            found = (getattr(module, "received_rows", None) for module in self.modules())
            layers = [rows for rows in found if rows is not None]
            if layers:
                leave = any(rule.home == "stash" and rule.offloads for rule in self.policy.rules)
                self.rows = self._auto_rows = AutoRows(layers, self._stash, self.policy.pool, leave=leave)
        return self._auto_rows

    def size_pool(self) -> bool:
        """Make the pool and offload's plan from what was measured. Returns whether there is a pool.

        Does nothing while a backward of the measured step is still to come, or if nothing was measured.
        """
        made = super().size_pool()
        rows, pool = self._auto_rows, self.pool
        if (
            rows is not None
            and pool is not None
            and not rows.chosen
            and self.policy.pool.device_bytes is not None
        ):
            rows.first(pool.device_pages)  # the pool was there before the first step
        return made

    def _pages_for_rows(self, pages: int) -> int:
        rows = self._auto_rows
        return pages if rows is None else rows.first(pages)

    def _step_over(self, check: bool) -> None:
        rows = self._auto_rows
        if rows is not None and rows.leave and not rows.chosen and not capturing():
            self.size_pool()
            if rows.chosen:  # expected rows leave: the next step shows offload which and when
                self._offload.measure()
        super()._step_over(check)
        # With check=False somebody else counts steps. A captured graph has the pool's addresses in it.
        if rows is None or not rows.chosen or not check or self._captured:
            return
        self._steps += 1
        if reads_after(self._steps):
            rows.read()
        if decides_after(self._steps) and rows.decide():
            rows.adopt()

    def stats(self) -> KeeperStats:
        """Bytes and peak by home and region, and the pool's tiers. Waits for the device."""
        found = super().stats()
        rows = self._auto_rows
        return found if rows is None else replace(found, expected_rows=rows.stats())

    # --- with a budget ---

    def count_state_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step: the plan to come counts the state of this optimizer, unless `optimizer=` was given.

        For adapters of trainers, which make their optimizer after the keeper. A state that is not known before the
        optimizer's first step is not counted, with a warning.
        """
        target, first = self._target, self._first
        if target is None or target.optimizer is not None or first is None or not first.over:
            return
        from pagestash.planning.budget import optimizer_state

        try:
            optimizer_state(optimizer)
        except (ValueError, AttributeError) as error:  # (a trainer's may be no optimizer of torch)
            warnings.warn(f"the plan does not count the optimizer's state: {error}", stacklevel=2)
        else:
            self._target = replace(target, optimizer=optimizer)

    def _begin_unplanned(self, target: "Target", model: nn.Module, regions: Sequence[str]) -> None:
        """Recompute layers until there is a plan, so that a step fits that would not; or keep all, where a layer
        cannot be recomputed."""
        for policy in (target.begins_with(model), Policy()):
            self._use(policy, quiet=True)
            try:
                super().attach(model, regions)
                return
            except ValueError:
                if not policy.rules:
                    raise

    def _make_plan(self, first: FirstCall) -> None:
        """Measure what the first step has shown, plan, and put the policy into effect."""
        assert self._target is not None
        target, self._target = self._target, None  # an error is raised once; steps after it have no policy
        first.remove()
        self._first = None
        super().detach()  # measured steps are without
        policy, self._opened = Policy(), []
        try:
            found = target.plan(first)
            policy, self._opened = found.policy, list(found.regions)
        except torch.OutOfMemoryError:  # perhaps the next batch is smaller
            self._begin_unplanned(target, first.model, first.declared)
            self._target = target
            self._first = FirstCall(first.model, first.declared, self._regions)
            raise
        finally:
            self._forget_rows()
            if self._first is None:
                self._use(Policy())
                super().attach(first.model, first.declared)
        if policy.rules:
            self._replace(policy, first)
        self.plan, self._target = found, target
        self._peak = PlannedPeak.of(found, self.device)
        log.info(
            "planned for %s: %d rules, predicted %s instead of %s, in %.3f of the time; see print(keeper.plan)",
            format_bytes(found.budget_bytes),
            len(found.policy.rules),
            format_bytes(found.predicted.peak_bytes),
            format_bytes(found.unplanned.peak_bytes),
            found.predicted.seconds / found.unplanned.seconds if found.unplanned.seconds else 1.0,
        )

    def _replace(self, policy: Policy, first: FirstCall) -> None:
        """Put another policy into effect; none, if it cannot be attached."""
        super().detach()
        self._use(policy, quiet=True)  # the plan's table says what each rule moves, be it nothing
        try:
            super().attach(first.model, [*first.declared, *self._opened])
        except BaseException:
            self._use(Policy())
            super().attach(first.model, first.declared)
            raise

    def __repr__(self) -> str:
        if self._target is not None and self.awaits_plan:
            return f"Keeper(budget={self._target.budget!r}, not planned yet)"
        return super().__repr__()
