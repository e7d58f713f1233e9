"""The models that a keeper is attached to: which of their modules a rule names, their parameters and buffers."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pagestash.policy import Policy, Rule
from pagestash.saved.compiled import compile_anew, is_compiled, is_wrapper
from pagestash.saved.hooks import SavedTensorHooks
from pagestash.saved.module_hooks import RegionHooks
from pagestash.saved.names import named_modules, prefixes
from pagestash.saved.region import no_module
from pagestash.torch_internals import (
    buffers_of,
    children_of,
    modules_in,
    parameters_of,
    transient_buffers_of,
)


class Attached:
    """Puts a keeper's hooks on the modules that its rules name, and knows those modules."""

    def __init__(self, policy: Policy, hooks: SavedTensorHooks, regions: RegionHooks) -> None:
        self.models: list[nn.Module] = []
        self.own_stash: dict[str, Any] = {}
        """Modules under a stash rule that write pages by themselves."""
        self._own_recompute: list[Any] = []
        self._policy = policy
        self._saved = hooks
        self._regions = regions

    def add(self, model: nn.Module, regions: Sequence[str], others: Sequence[str] = ()) -> None:
        """Put hooks on the modules of `model` that a rule names; a `ValueError` leaves everything as it was.

        A rule may also match only one of `regions`, or of `others`, the modules of other parts of the model.
        """
        if any(model is other for other in self.models):
            raise ValueError("this keeper is attached to the model already; keeper.detach() takes it off")
        if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
            raise ValueError("nn.DataParallel runs copies of a model in threads; use DistributedDataParallel")
        device = _device_of(model)
        for other in self.models:
            there = _device_of(other)
            if there != device and "meta" not in (there.type, device.type):
                raise ValueError(f"model is on {device}, this keeper's other model on {there}")
        names = named_modules(model)
        self._policy.check([*names, *regions, *others])
        for name in regions:
            rule = self._policy.rule_for(name)
            if rule is not None and rule.home == "recompute" and name not in names:
                raise ValueError(no_module(rule, name))
        found = [
            (name, module, rule)
            for name, module in names.items()
            if (rule := self._policy.rule_for(name)) is not None
            and not self._known(name, module, rule)
            and not self._inside_compiled(model, names, name, rule)
        ]
        # Regions inside are named after the module that opens them, also where no rule names that.
        openers = dict.fromkeys(
            max((outer for outer in prefixes(name) if outer in names), key=len, default="")
            for name in regions
        )
        unruled = [name for name in openers if name and self._policy.rule_for(name) is None]
        module: Any
        for name, module, rule in found:
            _refuse_scripted(name, module, rule)
            _refuse_checkpointed(names, name, rule)
            _refuse_partitioned(names, name, rule)
        _warn_of_ignored_experts(model)
        own = [
            module
            for name, module, rule in found
            if rule.home == "recompute"
            and hasattr(module, "use_recompute")
            and not self._made_with(prefixes(name))
        ]
        _let_recompute(own)  # before all else: a module may refuse
        self._own_recompute += own
        self.models.append(model)
        asked = {id(module) for module in own}
        for name, module, rule in found:
            self._saved.names[module] = name
            if id(module) not in asked:
                self._watch(model, names, name, rule)
            # (A module that writes pages by itself writes its values as they are.)
            if rule.home == "stash" and rule.bits is None and hasattr(module, "use_pool"):
                self.own_stash[name] = module
        for name in unruled:
            self._watch(model, names, name, None)

    def _watch(self, model: nn.Module, names: dict[str, nn.Module], name: str, rule: Rule | None) -> None:
        """Put the hooks of a region on the module `name`."""
        path = [model, *(names[each] for each in prefixes(name)), names[name]]
        compile_anew(path[:-1])
        self._regions.add(name, path, rule)

    def remove(self) -> None:
        """Take all hooks off, and tell modules that write pages or recompute by themselves to stop."""
        self._regions.remove()
        # (One that lost its parts since has stopped by itself.)
        for module in self.own_stash.values():
            if hasattr(module, "use_pool"):
                module.use_pool(None, 0)
        for module in self._own_recompute:
            if hasattr(module, "use_recompute"):
                module.use_recompute(False)
        self._saved.names.clear()
        self.own_stash.clear()
        self._own_recompute.clear()
        self.models.clear()

    def _known(self, name: str, module: nn.Module, rule: Rule) -> bool:
        """Whether the module has hooks already, as a part of another model."""
        before = self._saved.names.get(module)
        if before is None:
            return False
        if self._policy.rule_for(before) is not rule:
            raise ValueError(
                f"{name!r} is {before!r} of another model that this keeper is attached to, and the rules give the "
                "two names different homes; give both the same rule"
            )
        return True

    def _inside_compiled(self, model: nn.Module, names: dict[str, nn.Module], name: str, rule: Rule) -> bool:
        """Whether the module runs inside a compiled one under the same rule, and so needs no hooks.

        A `ValueError` if that is under another: no hook inside can tell what is saved where.
        """
        above = ["", *prefixes(name)]
        outside = next((each for each in above if is_compiled(names[each] if each else model)), None)
        if outside is None:
            if rule.home == "recompute" and is_compiled(names[name]) and not is_wrapper(names[name]):
                raise ValueError(
                    f"rule {rule.match!r}: {name!r} was compiled by {name}.compile(), and home='recompute' would "
                    "run it again uncompiled; put torch.compile(module) in its place in the model"
                )
            return False
        if outside and self._policy.rule_for(outside) is rule:
            return True
        whole = repr(outside) if outside else "the model"
        instead = f"name {outside!r} in the rule" if outside else "give what is saved in it no rule"
        raise ValueError(
            f"rule {rule.match!r} names {name!r}, which is inside {whole}, and torch.compile makes one graph of "
            f"that; compile {name!r} itself, or smaller parts than that, or {instead}"
        )

    def _made_with(self, above: Sequence[str]) -> bool:
        """Whether the innermost of the modules `above` that has a rule is recomputed, with all in it."""
        rules = [rule for name in above if (rule := self._policy.rule_for(name)) is not None]
        return bool(rules) and rules[-1].home == "recompute"

    # --- what is attached ---

    def own(self) -> set[str]:
        """The names of modules that write pages or recompute by themselves."""
        return {*self.own_stash, *(self._saved.names[module] for module in self._own_recompute)}

    def device(self) -> torch.device | None:
        """The device that the models are on now. (A model may be moved after it was attached.)"""
        return _device_of(self.models[0]) if self.models else None

    def modules(self) -> Iterator[nn.Module]:
        return iter(modules_in(*self.models))

    def parameters(self, modules: Iterable[nn.Module] | None = None) -> Iterator[nn.Parameter]:
        """Each once. `modules`: those of the models, where the caller has them."""
        found: dict[int, nn.Parameter] = {}  # (by identity: to hash a tensor takes a call of Python)
        for module in self.modules() if modules is None else modules:
            own = parameters_of(module)
            if own:
                for value in own.values():
                    if value is not None:
                        found[id(value)] = value
        return iter(found.values())

    def buffers(self, modules: Iterable[nn.Module] | None = None) -> Iterator[torch.Tensor]:
        """As far as they are state: flags and counters of a step are not.

        (Those a module with `grow_capacity` registers as not persistent.)
        """
        modules = [m for m in (self.modules() if modules is None else modules) if buffers_of(m)]
        if not modules:
            return iter(())
        passing = {
            id(buffers_of(module)[name])
            for module in modules
            if hasattr(module, "grow_capacity")
            for name in transient_buffers_of(module)
        }
        values = (value for module in modules for value in buffers_of(module).values())
        return iter(dict.fromkeys(b for b in values if b is not None and id(b) not in passing))


def _let_recompute(modules: Sequence[Any]) -> None:
    """Tell modules that recompute by themselves to do so: all of them, or none if one refuses."""
    told: list[Any] = []
    try:
        for module in modules:
            module.use_recompute(True)
            told.append(module)
    except ValueError:
        for module in told:
            module.use_recompute(False)
        raise


def _refuse_scripted(name: str, module: nn.Module, rule: Rule) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"rule {rule.match!r}: {name} is a module of torch.jit, which takes no hooks")


def _refuse_checkpointed(names: dict[str, nn.Module], name: str, rule: Rule) -> None:
    """A rule cannot hold inside a layer that transformers checkpoints by itself: that owns what is saved."""
    for outer in [*prefixes(name), name]:
        module: Any = names[outer]
        layer = any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
        if layer and module.gradient_checkpointing and rule.home != "keep":
            raise ValueError(
                f"rule {rule.match!r} names {name!r}, and {outer!r} has gradient checkpointing on, which "
                "recomputes all of it and saves nothing that a rule could move; call "
                "model.gradient_checkpointing_disable()"
            )


def _refuse_partitioned(names: dict[str, nn.Module], name: str, rule: Rule) -> None:
    """DeepSpeed's ZeRO-3 frees a module's weights after its forward, and gives them other memory each time."""
    if rule.home == "recompute" and any(hasattr(each, "ds_id") for each in names[name].parameters()):
        raise ValueError(
            f"rule {rule.match!r}: home='recompute' needs the weights of {name!r} as forward had them, and "
            "DeepSpeed's ZeRO-3 frees them after each forward; use home='offload' or 'stash', or ZeRO-2"
        )


def _warn_of_ignored_experts(model: nn.Module) -> None:
    """transformers takes `experts_implementation` for any model; many have no class that would ask for it."""
    modules = list(model.modules())
    asked = [
        m
        for m in modules
        if getattr(getattr(m, "config", None), "_experts_implementation", "") == "pagestash"
    ]
    if asked and not any(hasattr(module, "is_concatenated") for module in modules):
        warnings.warn(
            f"experts_implementation='pagestash' has no effect on {type(asked[0]).__name__}: none of its modules "
            "lets another implementation run it; rules hold as for any model",
            stacklevel=4,
        )


def _device_of(model: nn.Module) -> torch.device:
    first = _first_parameter(model)
    return torch.device("cpu") if first is None else first.device


def _first_parameter(module: nn.Module) -> nn.Parameter | None:
    """The first of `module.parameters()`, which takes 40 µs to find it: every step begins with this."""
    for parameter in parameters_of(module).values():
        if parameter is not None:
            return parameter
    for child in children_of(module).values():
        found = None if child is None else _first_parameter(child)
        if found is not None:
            return found
    return None
