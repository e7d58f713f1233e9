"""What a step changes besides parameters and optimizer state, saved so that a rerun starts from it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from pagestash.saved.keeper import Keeper
from pagestash.saved.recompute.rng import (
    python_rng_state,
    set_python_rng_state,
    set_torch_rng_state,
    torch_rng_state,
)
from pagestash.saved.weight_sums import WeightSums, memory_of
from pagestash.torch_internals import (
    buffers_of,
    calling_scaler,
    modules_in,
    parameters_of,
    scaler_state,
    set_scaler_state,
    transient_buffers_of,
)


class Involved:
    """The models, optimizers, scalers, generators and other state that take part in a step."""

    def __init__(
        self,
        keeper: Keeper,
        optimizers: Sequence[torch.optim.Optimizer],
        state: Iterable[torch.Tensor | nn.Module],
        scalers: Iterable[GradScaler],
        generators: Iterable[Any],
    ) -> None:
        self.optimizers = optimizers
        self.scalers = [scaler for scaler in scalers if scaler.is_enabled()]
        self.generators = list(generators)
        for generator in self.generators:
            if not any(hasattr(generator, name) for name in ("getstate", "get_state", "bit_generator")):
                raise ValueError(
                    f"generators: {generator!r}: expected a torch.Generator, a numpy Generator or RandomState, "
                    "or a random.Random"
                )
        self._keeper = keeper
        given = list(state)
        self._modules = [each for each in given if isinstance(each, nn.Module)]
        self._tensors = [each for each in given if isinstance(each, torch.Tensor)]

    @property
    def device(self) -> torch.device:
        assert self._keeper.device is not None
        return self._keeper.device

    def modules(self) -> list[nn.Module]:
        return list(dict.fromkeys([*self._keeper.modules(), *modules_in(*self._modules)]))

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter that may get a gradient in the step."""
        owned = (p for o in self.optimizers for group in o.param_groups for p in group["params"])
        return list(dict.fromkeys([*self._keeper.parameters(), *owned, *self._parameters()]))

    def tensors(self, buffers: "Buffers") -> list[torch.Tensor]:
        """Tensors that a step may change, besides the parameters that an optimizer updates."""
        scales = (each for scaler in self.scalers for each in scaler_state(scaler)[:2] if each is not None)
        return [*buffers.tensors(), *self._tensors, *self._parameters(), *scales]

    def unprotected(self) -> list[nn.Parameter]:
        """The parameters that only an optimizer may change."""
        protected = {id(tensor) for tensor in (*self._tensors, *self._parameters())}
        return [parameter for parameter in self.parameters() if id(parameter) not in protected]

    def trained(self) -> set[nn.Parameter]:
        """The parameters that an optimizer changes."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return {parameter for group in groups for parameter in group["params"] if parameter.requires_grad}

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of a parameter or buffer in the largest module that has it."""
        named = (
            pair
            for module in self.modules()
            for pair in (*module.named_parameters(), *module.named_buffers())
        )
        return max((name for name, each in named if each is tensor), key=len, default="a tensor of state=")

    def _parameters(self) -> list[nn.Parameter]:
        found = (p for module in modules_in(*self._modules) for p in parameters_of(module).values())
        return [parameter for parameter in found if parameter is not None]


class ProtectedState:
    """Saves tensors at the start of a step and restores them if it overflowed.

    In an eager step `put_back` writes what changed. In a graph `select` does so for device memory, which is all
    that a graph can change. Tensors are saved as bytes, because an expanded, quantised or inference tensor cannot
    be written in place, but its memory can. `on_host`: the copies are in host memory, of no use to a graph.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], device: torch.device, *, on_host: bool = False
    ) -> None:
        self._tensors = list(tensors)
        self._views = _places(self._tensors)
        shadow_on = "cpu" if on_host else None
        self._shadow = [torch.empty_like(view, device=shadow_on) for view in self._views.values()]
        self._on_device = [view.device.type == device.type for view in self._views.values()]

    def is_for(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether these tensors are in the memory that is saved."""
        return list(_places(tensors)) == list(self._views)

    def moved(self) -> list[torch.Tensor]:
        """Those that are in other memory now, by `tensor.data = ...`: neither a rerun nor a graph could follow."""
        return [tensor for tensor in self._tensors if not _places([tensor]).keys() <= self._views.keys()]

    def remember(self) -> None:
        """Save the tensors; in a capture the copies are part of the graph."""
        for shadow, view in zip(self._shadow, self._views.values()):
            shadow.copy_(view)

    def select(self, skip: torch.Tensor) -> None:
        """Restore device memory if `skip` is true on the device; the host does not wait."""
        for shadow, view, on_device in zip(self._shadow, self._views.values(), self._on_device):
            if on_device:
                view.copy_(torch.where(skip, shadow, view))

    def put_back(self, *, host_only: bool = False) -> None:
        """Restore what changed; waits for the device, unless `host_only` restores host memory alone."""
        for shadow, view, on_device in zip(self._shadow, self._views.values(), self._on_device):
            if host_only and on_device:
                continue
            if shadow.device != view.device or not torch.equal(shadow, view):
                view.copy_(shadow)


class Weights:
    """Parameters before an attempt, to find those that something else than an optimizer changes."""

    def __init__(self, involved: Involved) -> None:
        self._involved = involved
        self._sums = WeightSums(involved.unprotected())

    def refuse_written(self, *, updated: bool) -> None:
        """Raise if one was written to; `updated`: after the optimizers have changed those that they train."""
        trained = self._involved.trained() if updated else set()
        for parameter in self._sums.written():
            if parameter not in trained:
                raise ValueError(
                    f"train_step changes the parameter {self._involved.name_of(parameter)!r}, but not by a step of "
                    "an optimizer that GraphedStep was given, so an overflowing step could not be undone; pass "
                    "optimizer=..., or as state=[...] what it changes in place, a tensor or a module"
                )


class Buffers:
    """Which tensors the buffers of modules are; a forward may replace one by another tensor."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [(module, _state_of(module)) for module in modules]

    def tensors(self) -> list[torch.Tensor]:
        """All buffers, each once."""
        found = (value for _, names in self._modules for value in names.values() if value is not None)
        return list({id(tensor): tensor for tensor in found}.values())

    def refuse_replaced(self) -> None:
        """Raise if a buffer was replaced: a graph would continue to use the tensor that it was captured with."""
        for module, names in self._modules:
            now = _state_of(module)
            for name in now.keys() | names.keys():
                if now.get(name) is not names.get(name):
                    raise ValueError(
                        f"train_step replaces the buffer {name!r} of {type(module).__name__} by another tensor, "
                        "but a CUDA graph keeps reading the first; write to it in place (buffer.copy_(...)), or "
                        "pass graph=False"
                    )

    def put_back(self) -> None:
        for module, names in self._modules:
            for name in _state_of(module).keys() - names.keys():
                del buffers_of(module)[name]
            buffers_of(module).update(names)


class RandomStates:
    """The states of all generators that a step draws from; with `in_graph`, that a replay of a graph draws from."""

    def __init__(self, involved: Involved, *, in_graph: bool = False) -> None:
        self._device = involved.device
        self._torch = torch_rng_state(self._device)
        self._python = None if in_graph else python_rng_state()
        drawn = on_device(involved.generators) if in_graph else involved.generators
        self._others = [(generator, generator_state(generator)) for generator in drawn]

    def put_back(self) -> None:
        set_torch_rng_state(self._device, self._torch)
        if self._python is not None:
            set_python_rng_state(self._python)
        for generator, state in self._others:
            set_generator_state(generator, state)


class Before:
    """Random states, gradients, and the host state of buffers and scalers, before an attempt."""

    def __init__(self, involved: Involved) -> None:
        self.buffers = Buffers(involved.modules())
        self._involved = involved
        self._random = RandomStates(involved)
        self._scalers = [(scaler, _copied(scaler_state(scaler))) for scaler in involved.scalers]
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None, torch.Tensor | None]] = []

    def remember_gradients(self) -> None:
        for parameter in self._involved.parameters():
            gradient = parameter.grad
            copy = None if gradient is None else gradient.detach().clone()
            self._gradients.append((parameter, gradient, copy))

    def put_back(self) -> None:
        self._random.put_back()
        self.buffers.put_back()
        for scaler, state in self._scalers:
            set_scaler_state(scaler, _copied(state))
        for optimizer in self._involved.optimizers:
            for name in ("grad_scale", "found_inf"):  # a scaler sets them, and an overflow leaves them there
                vars(optimizer).pop(name, None)
        for parameter, gradient, copy in self._gradients:
            if gradient is not None and copy is not None:
                with torch.no_grad():
                    gradient.copy_(copy)
            parameter.grad = gradient


def on_device(generators: Iterable[Any]) -> list[torch.Generator]:
    """The generators that a CUDA graph draws from."""
    return [g for g in generators if isinstance(g, torch.Generator) and g.device.type == "cuda"]


def refuse_unknown_scaler(known: Sequence[GradScaler]) -> None:
    """Called from an optimizer's hook: raise if the caller is a gradient scaler that was not passed."""
    scaler = calling_scaler()
    if scaler is not None and scaler.is_enabled() and scaler not in known:
        raise ValueError(
            "train_step uses a GradScaler that GraphedStep does not know, so an overflowing step could not be "
            "undone in it; pass scaler=..."
        )


def generator_state(generator: Any) -> Any:
    """Of a generator of torch, NumPy or Python, or of the modules that are global ones."""
    if hasattr(generator, "getstate"):  # Python's
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def set_generator_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _copied(state: Any) -> Any:
    """A scaler's state, with copies of the dicts that it changes in place."""
    scale, tracker, stages = state
    copies = {optimizer: dict(stage) for optimizer, stage in stages.items()}
    return scale, tracker, defaultdict(stages.default_factory, copies)


def _state_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's buffers, without the flags and counters of a module with a capacity."""
    passing = transient_buffers_of(module) if hasattr(module, "grow_capacity") else ()
    return {name: buffer for name, buffer in buffers_of(module).items() if name not in passing}


def _places(tensors: Iterable[torch.Tensor]) -> dict[tuple[int, int], torch.Tensor]:
    """The memory of these tensors by address and size, each once."""
    return {(view.data_ptr(), view.nbytes): view for tensor in tensors for view in memory_of(tensor)}
