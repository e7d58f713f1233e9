"""Hooks on the modules that a rule names: a region is open while such a module runs its forward."""

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

from pagestash.policy import Rule
from pagestash.saved.calls import begin, end, set_calls, under_way
from pagestash.saved.compiled import at_compile_time, hidden, hidden_here
from pagestash.saved.hooks import SavedTensorHooks
from pagestash.saved.module_hook import Hook, RunHook
from pagestash.saved.recompute.home import Recompute
from pagestash.saved.recompute.recorded_forward import RecordedForward
from pagestash.saved.recompute.replay import is_sharded_class
from pagestash.saved.region import Region, enter, frames, leave
from pagestash.saved.storage import buffer_keys, parameter_keys
from pagestash.torch_internals import (
    FSDP1_WRAPPED,
    children_of,
    compiling_around,
    current_transform,
    forward_hooks_of,
    forward_pre_hooks_of,
    modules_in,
    top_saved_tensors_hooks,
)


class Outside(Protocol):
    """Is told of forwards outside of a step."""

    def saw(self, output: Any) -> None: ...


class RegionHooks:
    """Opens and closes the regions of one keeper's modules, while it is in a step."""

    def __init__(self, hooks: SavedTensorHooks, recompute: Recompute) -> None:
        self.in_step = False
        self.aside = False
        """Whether forwards that run now do not belong to the step."""
        self.openings: list[Opening] = []
        self.outside: Outside | None = None
        """Told of the outputs of watched modules, until the first step is opened."""
        self.hooks = hooks
        self.recompute = recompute
        self._hooks: list[Any] = []
        self._next_to_forward: list[tuple[str, nn.Module, Any, Any]] = []
        self._units: WeakSet[nn.Module] = WeakSet()
        self._calls = under_way()

    def start(self) -> None:
        """A step begins."""
        for name, module, opening, closing in self._next_to_forward:
            before, after = forward_pre_hooks_of(module), forward_hooks_of(module)
            if opening.id not in before or closing.id not in after:
                raise RuntimeError(
                    f"the keeper's hooks on {name!r} are gone: somebody has cleared the module's hooks since "
                    "keeper.attach(model); call keeper.detach(), and attach(model) again"
                )
            # A replay runs `forward` itself, so no other hook may come between it and ours.
            before.move_to_end(opening.id)
            after.move_to_end(closing.id, last=False)
        self.in_step = True
        self._calls = under_way()

    def stop(self) -> None:
        """The step is over, and so are calls that an exception left open."""
        self.in_step = False
        set_calls(self._calls)

    def remove(self) -> None:
        """Take all hooks off again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.openings.clear()
        self._next_to_forward.clear()
        self._units.clear()

    def add(self, name: str, path: Sequence[nn.Module], rule: Rule | None) -> None:
        """Open a region around each forward of the last module of `path`, which leads down to it from the model.

        Without a rule, it has the rule of the region around it: regions inside are named after it.
        """
        module = path[-1]
        first = Opening(self, name, path, rule)
        self.openings.append(first)
        opening = module.register_forward_pre_hook(first, with_kwargs=True)
        # `always_call`: when forward raises, the region is over, too. `prepend`: of two keepers' regions, the one
        # that was opened last is closed first.
        closing = module.register_forward_hook(Closing(first), always_call=True, prepend=True)
        self._hooks += [opening, closing]
        if rule is not None and rule.home == "recompute":
            self._next_to_forward.append((name, module, opening, closing))

    def watch_units(self, modules: Sequence[nn.Module]) -> None:
        """Note the weights that FSDP's units among `modules` gather from here on; the first's are there."""
        units: list[nn.Module | None] = [module for module in modules[1:] if is_sharded_class(type(module))]
        # (A traced module's children are no dict.)
        units += [children_of(m)[FSDP1_WRAPPED] for m in modules if FSDP1_WRAPPED in children_of(m)]
        for unit in units:
            if unit is not None and unit not in self._units:
                self._units.add(unit)
                self._hooks.append(unit.register_forward_pre_hook(RunHook(note_gathered)))

    def refuse_compiled(self) -> None:
        """At the end of a step: raise for hooks that were compiled into a graph, so that no region was opened."""
        for opening in self.openings:
            if opening.compiled and not opening.ran:
                raise RuntimeError(opening.why_not())


def refuse_attached(model: nn.Module) -> None:
    """Raise if a keeper's hooks are on a module of the model."""
    for name, module in model.named_modules():
        if any(isinstance(hook, Opening) for hook in forward_pre_hooks_of(module).values()):
            raise ValueError(
                f"a keeper is attached to the model, with a rule for {name!r}, and a plan is for the model "
                "without; call keeper.detach() first"
            )


def note_gathered(module: nn.Module, args: Any) -> None:
    """Before the forward of an FSDP unit inside a region: its weights have just got new memory.

    (FSDP2's own hook is before all others; FSDP1 gathers in the forward of the wrapper.)
    """
    current = frames()
    if current:
        current[-1].weights |= parameter_keys(modules_in(module))


class Opening(Hook):
    """Before forward: open the module's region."""

    def __init__(self, regions: RegionHooks, name: str, path: Sequence[nn.Module], rule: Rule | None) -> None:
        self.regions = regions
        self.name = name
        self.path = path
        self.rule = rule
        self.ran = False
        """Whether a region was ever opened."""
        self.no_grad = False
        self.others = False
        """Whether other saved-tensor hooks were active inside the keeper's when a region was opened."""
        self.compiled = False
        self._parameters: frozenset[int] | None = None
        """Storages of the parameters inside when a region was last opened."""

    @hidden_here
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            self.note_compiled()
            return
        # A replay outside the graph would save other tensors than the compiled forward did.
        recomputed = self.rule if self.rule is not None and self.rule.home == "recompute" else None
        if recomputed is not None and compiling_around() is not None and self._opens(frames()):
            raise RuntimeError(_compiled_again(self.name, recomputed))
        self.open(module, args, kwargs)

    @at_compile_time
    def note_compiled(self) -> bool:
        self.compiled = self.rule is not None
        return True

    def why_not(self) -> str:
        """The error for a hook that only the compiler has seen."""
        assert self.rule is not None
        return (
            f"rule {self.rule.match!r} names {self.name!r}, which runs inside torch.compile of a module or "
            "function around it. That is one graph, in which regions cannot be told apart. (The gradients of this "
            f"step are right.) Compile {self.name!r} itself before keeper.attach(model), or smaller parts, or name "
            "the compiled module in the rule"
        )

    @hidden
    def _opens(self, current: tuple[Region, ...]) -> bool:
        """Whether a region is opened inside those that are open now."""
        regions = self.regions
        # Without frames it is another thread, such as autograd's when it recomputes a checkpointed forward.
        if not current or not regions.in_step or regions.aside:
            return False
        run = current[-1].run
        return (run is None or not run.replays) and torch.is_grad_enabled() and current_transform() is None

    @hidden
    def open(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        current = frames()
        if not self._opens(current):
            if current:
                begin(self, None)
            self.no_grad |= self.regions.in_step and not torch.is_grad_enabled()
            return
        regions, outer = self.regions, current[-1]
        self.ran = True
        if regions.hooks.look is not None:
            hooks = top_saved_tensors_hooks(True)
            self.others |= hooks is not None and not isinstance(
                getattr(hooks[0], "__self__", None), SavedTensorHooks
            )
        run, parameters = outer.run, None
        modules = modules_in(module)
        if self.rule is not None and self.rule.home != "recompute":
            run = None
        elif run is None and self.rule is not None:
            before = next(reversed(forward_pre_hooks_of(module).values()))
            after = next(iter(forward_hooks_of(module).values()), None)
            if not (isinstance(before, Hook) and isinstance(after, Hook)):
                raise RuntimeError(
                    f"region {self.name!r} is under recompute, and a hook was registered on it inside of the step, "
                    "between it and the keeper, so that no replay runs the hook; register it before the step"
                )
            # (A region inside a recomputed one is recomputed with it.)
            first = RecordedForward(
                regions.recompute,
                regions.hooks,
                outer,
                self.path,
                modules,
                self.name,
                self.rule,
                (args, kwargs),
            )
            run, parameters = first, first.parameters()
        if parameters is None:
            parameters = parameter_keys(modules)
        if parameters != self._parameters:
            self._parameters = frozenset(parameters)
            regions.watch_units(modules)
        buffers = buffer_keys(modules)
        region = Region(
            regions.hooks,
            self.name,
            self.rule or outer.rule,
            weights=parameters | buffers if buffers else parameters,
            run=run,
        )
        begin(self, region)
        enter(region)


class Closing(Hook):
    """After forward, also when it raised: close the region that `opening` opened for this call."""

    def __init__(self, opening: Opening) -> None:
        self.opening = opening

    @hidden_here
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.close(output)

    @hidden
    def close(self, output: Any) -> None:
        regions = self.opening.regions
        if regions.outside is not None and self.opening is regions.openings[0] and torch.is_grad_enabled():
            regions.outside.saw(output)
        region = end(self.opening)
        left = () if region is None else leave(region)
        if region is None or not left:
            return
        for each in left:
            each.owner.close(each)
        run = region.run
        if isinstance(run, RecordedForward):
            for frame in frames():
                if frame.run is run:
                    return  # it goes on outside
            run.close(region.weights, output)


def _compiled_again(name: str, rule: Rule) -> str:
    return (
        f"rule {rule.match!r}: {name!r} runs inside torch.compile (of a module around it, or by {name}.compile()), "
        "and home='recompute' would run it again outside. Compile the module itself, with torch.compile(module) in "
        "its place in the model, before keeper.attach(model); or give it another home"
    )
