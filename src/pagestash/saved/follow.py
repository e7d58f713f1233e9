"""A keeper that follows a schedule: where in the step we are, and what comes next.

A stage does the same for every microbatch, so one microbatch of one step tells what each of its actions puts away
and asks for. With that the order of a whole step follows from any plan of the same stages, before it has ever run.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn

from pagestash.saved.offload.moving import Offload
from pagestash.saved.offload.plan import Event, GroupBytes, Key
from pagestash.schedules.observe import Observation
from pagestash.schedules.plan import Action, Kind, Plan, immediate_backwards, read_plan
from pagestash.torch_internals import stages_of

Aside = Callable[[], AbstractContextManager[None]]
"""Opens a context whose forwards do not belong to the step."""
StageEvents = dict[tuple[Kind, int], list[tuple[str, Key]]]
"""For each kind of action of each stage, its puts and gets, by (stage, region, index)."""


def follow(schedule: Any, offload: Offload, aside: Aside, stage_events: StageEvents) -> Observation:
    """Tell `offload` ahead of a step what it will do, and in the step which action runs.

    What stages do is learned into `stage_events`, which schedules of the same stages share.
    """
    plan = read_plan(schedule)
    if plan.splits_backward:
        modules = [stage.submod for stage in stages_of(schedule)]
        _refuse_selective_checkpoints(modules, type(schedule).__name__)
    return Observation(schedule, _Following(offload, aside, stage_events))


class _Following:
    """Listens to one schedule."""

    def __init__(self, offload: Offload, aside: Aside, stage_events: StageEvents) -> None:
        self._offload, self._aside, self._stage_events = offload, aside, stage_events
        self._order = offload.order
        self._under_way: dict[Action, int] = {}
        """Actions that have begun, and how many events there were: two where a pair of them is interleaved."""
        self._expected: tuple[Action, ...] = ()
        self._groups: dict[Key, GroupBytes] | None = None
        self._before_first = ExitStack()

    def begin_step(self, plan: Plan) -> None:
        self._order.immediate_backwards = immediate_backwards(plan)
        # Another schedule of these stages, or a step that went its own way, may have put its own plan in place.
        ours = plan.actions == self._expected and self._offload.window.plan.groups is self._groups
        if not ours and self._expect(plan):
            self._expected, self._groups = plan.actions, self._offload.window.plan.groups
        # The first step of a schedule runs the stages once more, to learn their shapes.
        self._before_first.enter_context(self._aside())

    def end_step(self) -> None:
        self._before_first.close()
        self._under_way.clear()
        self._order.position = ()

    def begin(self, action: Action) -> None:
        self._before_first.close()
        self._under_way[action] = len(self._order.events)
        self._set_position()

    def end(self, action: Action) -> None:
        begun = self._under_way.pop(action)
        self._set_position()
        own = (action.stage, action.microbatch)
        self._stage_events[action.kind, action.stage] = [
            (kind, (key[0], *key[2:]))
            for kind, key in self._order.events[begun:]
            if kind != "drop" and key[:2] == own
        ]

    def _set_position(self) -> None:
        """What is put away now belongs to the forward, if one is under way."""
        action = max(self._under_way, key=lambda action: action.kind == "F", default=None)
        self._order.position = () if action is None else (action.stage, action.microbatch)

    def _expect(self, plan: Plan) -> bool:
        """Tell the home the order of the step; False while some action was never seen, or no group's size is."""
        sizes: dict[Key, GroupBytes] = {
            (key[0], *key[2:]): group
            for key, group in self._offload.window.plan.groups.items()
            if len(key) == 4
        }
        events: list[Event] = []
        groups: dict[Key, GroupBytes] = {}
        for action in plan.actions:
            seen = self._stage_events.get((action.kind, action.stage))
            if seen is None:
                return False
            for kind, what in seen:
                if what not in sizes:
                    return False
                key: Key = (action.stage, action.microbatch, *what[1:])
                groups[key] = sizes[what]
                events.append(("put" if kind == "put" else "get", key))
            if action.kind in ("B", "W"):
                own = (action.stage, action.microbatch)
                events += [("drop", key) for key in groups if key[:2] == own]
        if groups:
            self._offload.expect(events, groups)
        return bool(groups)


def _refuse_selective_checkpoints(modules: list[nn.Module], schedule: str) -> None:
    """torch's selective checkpointing raises in the second half of a split backward: better said now."""
    for module in modules:
        for name, inner in module.named_modules():
            keywords = getattr(getattr(inner, "checkpoint_fn", None), "keywords", {})
            if "context_fn" in keywords:
                raise ValueError(
                    f"{schedule} splits backward, and {name or 'a stage'} is checkpointed selectively: its second "
                    "backward would fail. Checkpoint the whole module, give its region a home, or take a schedule "
                    "that does not split (1F1B, Interleaved1F1B)"
                )
