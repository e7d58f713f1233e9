"""Steps that need not be watched as a whole: they are like steps before.

Of a tensor that stays, a keeper does nothing but count the bytes, and to see it costs an eager step more than most
of what a keeper does otherwise. So a step is not watched if the model is called as it was in two steps that were
watched and kept the same bytes: not at all where every rule says `keep`, and elsewhere only where something may
move (`watch.py`). It counts as they did. Calls are alike if they have arguments of the same shapes and dtypes,
under the same autocast, and the same modules train and the same parameters want gradients. (A module that was added
since the step before is seen at the end of such a step: until then its tensors are held as without a keeper.)

All steps are watched for good if calls of one kind keep other bytes each time, if a step goes on otherwise than the
one it was taken for, if somebody asks within a step how many bytes are held, and where rows are marked.
Whoever counts peaks anew has the next steps watched: what a model saves may have changed in a way that its calls do
not show (checkpointing).
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import nn

from pagestash.policy import Policy
from pagestash.saved.compiled import hidden, hidden_here
from pagestash.saved.homes import Keep, Tally
from pagestash.saved.module_hook import Hook
from pagestash.saved.watch import Learned, Watch
from pagestash.torch_internals import current_transform

LookAway = Callable[[Learned | None], bool]
"""Sees the rest of a step only where something may move, by what a step like it says; given None, nothing of it.

Returns whether it could."""
_MOST_KINDS = 64
_AGAIN = 100
"""After so many steps of one kind that were not watched, one is watched: what a call does may change unseen."""
_VARIES = 4
"""After so many steps of one kind, each of which kept other bytes than the one before, bytes vary."""


class Contents(NamedTuple):
    """What the attached models consist of."""

    modules: list[nn.Module]
    parameters: list[nn.Parameter]

    def state(self) -> Hashable:
        """What else than a call's arguments decides on how much is saved."""
        return (
            bytes([module.training for module in self.modules]),
            bytes([parameter.requires_grad for parameter in self.parameters]),
        )

    def same(self, other: "Contents") -> bool:
        return self.modules == other.modules and [*map(id, self.parameters)] == [*map(id, other.parameters)]


class _Unlike(Exception):
    """An argument that cannot be compared."""


class _Kept(NamedTuple):
    """What a watched step did."""

    calls: tuple[Hashable, ...]
    peaks: "_Peaks"
    staying: "_Peaks"
    """Of that, what other homes left where it was."""
    learned: Learned


class _Peaks(NamedTuple):
    """Bytes that were kept: at their peak, and at that of each region."""

    all: int
    by_region: dict[str, int]

    @classmethod
    def of(cls, tally: Tally) -> "_Peaks":
        return cls(tally.peak, {name: peak for name, (_, peak) in tally.by_region.items()})


class _Known:
    """Watched steps whose first call was of one kind."""

    def __init__(self) -> None:
        self.last: _Kept | None = None
        self.settled = False
        """Whether the last two did the same."""
        self._unlike = 0
        self._unwatched = 0

    def add(self, step: _Kept) -> bool:
        """Whether there is hope that steps of this kind are alike."""
        self.settled = step == self.last
        self._unlike += self.last is not None and not self.settled
        self.last = step
        self._unwatched = 0
        return self._unlike < _VARIES

    def step_to_take_it_for(self) -> _Kept | None:
        """The watched step that the next one is like, if that need not be watched."""
        if not self.settled or self._unwatched == _AGAIN:
            return None
        self._unwatched += 1
        return self.last


class SteadySteps:
    """Decides which steps of a keeper are not watched, and counts them."""

    def __init__(self, policy: Policy, keep: Keep, watch: Watch) -> None:
        self.on = bool(policy.rules)
        """Whether any step may go unwatched. (Without a rule nothing is put on a model at all.)"""
        self._moves = any(rule.moves for rule in policy.rules)
        self._codes = any(rule.bits is not None for rule in policy.rules)
        self._keep = keep
        self._watch = watch
        self._hooks: list[Any] = []
        self._known: dict[Hashable, _Known] = {}
        self._contents: tuple[list[ref[nn.Module]], list[ref[nn.Parameter]]] | None = None
        self._begun: Contents | None = None
        self._look: Callable[[], Any] | None = None
        """In a step that began with the contents of the one before, until it is known whether it is watched: looks
        for those of now."""
        self._look_away: LookAway | None = None
        """In a step."""
        self._state: Hashable = None
        self._calls: list[Hashable] = []
        self._taken_for: _Kept | None = None
        """The watched step that the present one, which is not watched, is like."""
        self._before = _Peaks(0, {})
        """Peaks before the step: it has its own until it is over."""

    def add(self, model: nn.Module) -> None:
        """Look at the calls of `model`."""
        self._contents = None
        if self.on:
            self._hooks.append(
                model.register_forward_pre_hook(_Called(self, len(self._hooks)), with_kwargs=True)
            )

    def remove(self) -> None:
        """Look at no model any more, and forget what steps of these were like."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.forget()

    def forget(self) -> None:
        """Take no step for one of those that were watched until now."""
        self._known.clear()
        self._contents = None

    def contents(self) -> Contents | None:
        """Of the models, where the last step looked for them at its end; None if one of these is gone.

        Then the device was at work. At the beginning of a step it waits, and to find them takes as long as several
        kernels do. (Not where tensors are coded: a weight that is not known to be one would lose bits.)
        """
        return None if self._codes else self._last_contents()

    def _last_contents(self) -> Contents | None:
        if self._contents is None:
            return None
        modules = [module() for module in self._contents[0]]
        parameters = [parameter() for parameter in self._contents[1]]
        if None in modules or any(parameter is None for parameter in parameters):
            return None
        return Contents(cast(list[nn.Module], modules), cast(list[nn.Parameter], parameters))

    # --- a step ---

    def begin(self, contents: Contents, look_away: LookAway, look: Callable[[], Any] | None) -> None:
        """A step begins, watched; `look_away` ends that.

        `look` is given where `contents` are those of the step before, and is called if the step goes on watched.
        """
        self._look = look
        if not self.on or not self._hooks or self._keep.tally.bytes:
            self._goes_on()
            return
        if look is None and self._moves and self._contents is not None:
            before = self._last_contents()
            if before is None or not before.same(contents):
                self.forget()
        self._look_away, self._calls, self._taken_for = look_away, [], None
        self._begun, self._state = contents, contents.state()
        tally = self._keep.tally
        self._before = _Peaks.of(tally)
        tally.reset_peak()
        self._keep.staying.reset_peak()

    @hidden
    def called(self, model: int, args: Any, kwargs: Any) -> None:
        """A model is called."""
        if self._look_away is None or not torch.is_grad_enabled() or current_transform() is not None:
            return
        try:
            call = (self._state, model, _autocast(), _form(args), _form(kwargs))
        except _Unlike:
            self._leave_on()
            self._goes_on()
            return
        self._calls.append(call)
        like = self._taken_for
        if like is not None:
            if like.calls[: len(self._calls)] != tuple(self._calls):
                self._leave_on()
        elif len(self._calls) == 1:
            known = self._known.get(call)
            last = None if known is None else known.step_to_take_it_for()
            if last is not None and self._look_away(last.learned if self._moves else None):
                self._taken_for, self._look = last, None
            else:
                self._goes_on()

    def _goes_on(self) -> None:
        """The step is watched."""
        look, self._look = self._look, None
        if look is not None:
            look()

    def end(self, *, failed: bool, look: Callable[[], Contents]) -> None:
        """The step is over. `look` finds the models' contents."""
        self._look = self._contents = None
        begun, self._begun = self._begun, None
        if self._look_away is None:
            return
        self._look_away = None
        tally, like, calls = self._keep.tally, self._taken_for, tuple(self._calls)
        if like is not None:
            self.on = self.on and (failed or calls == like.calls)
            if not failed:
                tally.reset_peak()  # a part of it was seen, and perhaps counted for another region
                self._merge(self._peaks_like(like))
        elif not failed and calls and not tally.bytes and self.on:
            step = _Kept(calls, _Peaks.of(tally), _Peaks.of(self._keep.staying), self._watch.learned)
            if len(self._known) > _MOST_KINDS:
                self._known.clear()
            alike = self._known.setdefault(calls[0], _Known()).add(step)
            self.on = alike and not (self._moves and self._watch.depends)
        if not failed and begun is not None and (self._moves or like is not None):
            contents = look()
            if begun.same(contents):
                self._contents = ([*map(ref, contents.modules)], [*map(ref, contents.parameters)])
            else:
                self.forget()
        self._merge(self._before)

    def _peaks_like(self, like: _Kept) -> _Peaks:
        """The peaks of a step that was seen in part: those of `like`, and what more stayed of what was to move."""
        now, then = _Peaks.of(self._keep.staying), like.staying
        more = {name: peak - then.by_region.get(name, 0) for name, peak in now.by_region.items()}
        by_region = dict(like.peaks.by_region)
        for name, size in more.items():
            by_region[name] = by_region.get(name, 0) + max(0, size)
        return _Peaks(like.peaks.all + max(0, now.all - then.all), by_region)

    def asked(self) -> None:
        """Somebody wants to know what is held. Within a step only one that is watched can tell."""
        if self._look_away is not None:
            self._leave_on()
            self._goes_on()
            self._look_away = None
            self._merge(self._before)
            if self._taken_for is not None:
                self._merge(self._taken_for.peaks)

    def _leave_on(self) -> None:
        self.on = False

    def _merge(self, peaks: _Peaks) -> None:
        """Peaks of another time, at which nothing of now was held."""
        tally = self._keep.tally
        tally.peak = max(tally.peak, peaks.all)
        for name, size in peaks.by_region.items():
            sizes = tally.by_region.setdefault(name, [0, 0])
            sizes[1] = max(sizes[1], size)


class _Called(Hook):
    """Before the forward of an attached model."""

    def __init__(self, steps: SteadySteps, model: int) -> None:
        self._steps = steps
        self._model = model

    @hidden_here
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._steps.called(self._model, args, kwargs)


def _autocast() -> Hashable:
    return tuple(
        torch.get_autocast_dtype(kind) for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)
    )


def _form(value: Any) -> Hashable:
    """What of an argument decides on how much is saved."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.requires_grad
    if type(value) in (tuple, list):
        return tuple(_form(item) for item in value)
    if type(value) is dict:
        return tuple((name, _form(item)) for name, item in value.items())
    if value is None or type(value) in (bool, int, str):
        return value
    raise _Unlike
