"""Events at the begin and end of a schedule's actions."""

from collections.abc import Callable
from typing import Any, Protocol

from pagestash.schedules.plan import Action, Plan, read_plan
from pagestash.torch_internals import has_backward, stages_of


class Listener(Protocol):
    """Is told about one rank's actions, in the thread that runs the schedule."""

    def begin_step(self, plan: Plan) -> None:
        """A step begins, which will run `plan`."""
        ...

    def end_step(self) -> None:
        """The step has ended, or has raised."""
        ...

    def begin(self, action: Action) -> None:
        """A stage is about to run."""
        ...

    def end(self, action: Action) -> None:
        """A stage has run, or has raised."""
        ...


class Observation:
    """Tells a listener about every action of a schedule, until it is removed.

    It wraps methods of this schedule and its stages, not of their classes. (`register_custom_function` would
    replace an action instead of observing it.) Several schedules may share stages, one for each number of
    microbatches: the listener of the running schedule is told. The forward and backward that the first step
    runs only to infer shapes are not reported.
    """

    def __init__(self, schedule: Any, listener: Listener) -> None:
        read_plan(schedule)  # raises if the schedule cannot be followed, before anything is wrapped
        self._schedule, self._listener = schedule, listener
        self._running = False
        self._wrapped: list[tuple[Any, str, _Layer]] = []
        self._wrap(schedule, "step", self._step)
        for stage in stages_of(schedule):
            self._wrap(stage, "forward_one_chunk", self._stage(stage, lambda *_, **__: "F"))
            self._wrap(stage, "backward_one_chunk", self._stage(stage, _half))
            self._wrap(stage, "backward_weight_one_chunk", self._stage(stage, lambda *_, **__: "W"))

    def remove(self) -> None:
        """Stop, and unwrap the methods, also under wrappers that others added since."""
        for owner, name, layer in self._wrapped:
            layer.take_off(owner, name)
        self._wrapped.clear()
        self._running = False

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        layer = _Layer(getattr(owner, name), around)
        setattr(owner, name, layer)
        self._wrapped.append((owner, name, layer))

    def _step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._wrapped or not has_backward(self._schedule):  # removed, or nothing is saved
            return inner(*args, **kwargs)
        self._listener.begin_step(read_plan(self._schedule))
        self._running = True
        try:
            return inner(*args, **kwargs)
        finally:
            self._running = False
            self._listener.end_step()

    def _stage(self, stage: Any, kind: Callable[..., Any]) -> Callable[..., Any]:
        def around(inner: Callable[..., Any], microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if not self._running:
                return inner(microbatch, *args, **kwargs)
            action = Action(kind(*args, **kwargs), stage.stage_index, microbatch)
            self._listener.begin(action)
            try:
                return inner(microbatch, *args, **kwargs)
            finally:
                self._listener.end(action)

        return around


class _Layer:
    """A wrapper around a method of one object; wrappers can be removed in any order."""

    def __init__(self, inner: Callable[..., Any], around: Callable[..., Any]) -> None:
        self.inner, self._around = inner, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self.inner, *args, **kwargs)

    def take_off(self, owner: Any, name: str) -> None:
        above = owner.__dict__.get(name)
        if above is self:
            if getattr(self.inner, "__self__", None) is owner:  # the method of its class
                delattr(owner, name)
            else:
                setattr(owner, name, self.inner)
            return
        while isinstance(above, _Layer):
            if above.inner is self:
                above.inner = self.inner
                return
            above = above.inner


def _half(loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> str:
    """The kind of a `backward_one_chunk` call, from its arguments after the microbatch."""
    return "B" if full_backward else "I"
