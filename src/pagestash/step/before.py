"""The state that a step may change before its first update, saved so that a rerun starts from it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from pagestash.saved.keeper import Keeper
from pagestash.saved.recompute.rng import TorchRng, set_torch_rng_state, torch_rng_state
from pagestash.step.randomness import Generators, is_generator, set_state
from pagestash.step.reach import iterators, reached
from pagestash.step.scaling import Scalers
from pagestash.step.state import Buffers
from pagestash.torch_internals import modules_in, parameters_of


class Involved:
    """What takes part in a step: the keeper's model, what was passed, and what `train_step` refers to."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        keeper: Keeper,
        optimizers: Sequence[torch.optim.Optimizer],
        state: Iterable[torch.Tensor],
        scalers: Iterable[GradScaler],
        generators: Iterable[Any],
    ) -> None:
        found = reached(train_step)
        for name in iterators(found):
            raise ValueError(
                f"train_step refers to the iterator {name!r}: a rerun of the step would get the next item; pass "
                "the batch as an argument"
            )
        values = list(found.values())
        self.device = keeper.device
        self.optimizers = optimizers
        self.scalers = Scalers([*scalers, *(v for v in values if isinstance(v, GradScaler))], optimizers)
        self.generators = Generators([*generators, *filter(is_generator, values)])
        self._keeper = keeper
        self._others = [value for value in values if isinstance(value, nn.Module)]
        self._state = list(state)

    def modules(self) -> list[nn.Module]:
        return list(dict.fromkeys([*self._keeper.modules(), *modules_in(*self._others)]))

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter that may get a gradient in the step."""
        owned = (p for o in self.optimizers for group in o.param_groups for p in group["params"])
        others = (p for module in modules_in(*self._others) for p in parameters_of(module).values())
        found = [*self._keeper.parameters(), *owned, *(p for p in others if p is not None)]
        return list(dict.fromkeys(found))

    def state(self, buffers: Buffers) -> list[torch.Tensor]:
        """Tensors that a step may change, besides parameters and optimizer state."""
        return [*buffers.tensors(), *self._state, *self.scalers.tensors()]


class Before:
    """Random states, gradients, and the host state of buffers and scalers, before an attempt."""

    def __init__(self, involved: Involved) -> None:
        self.buffers = Buffers(involved.modules())
        self._involved = involved
        self._random = AllRandom(involved)
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None, torch.Tensor | None]] = []
        involved.scalers.remember()

    def remember_gradients(self) -> None:
        for parameter in self._involved.parameters():
            gradient = parameter.grad
            copy = None if gradient is None else gradient.detach().clone()
            self._gradients.append((parameter, gradient, copy))

    def put_back(self) -> None:
        self._random.put_back()
        self.buffers.put_back()
        self._involved.scalers.put_back()
        for parameter, gradient, copy in self._gradients:
            if gradient is not None and copy is not None:
                with torch.no_grad():
                    gradient.copy_(copy)
            parameter.grad = gradient


class AllRandom:
    """The states of all generators that a step draws from; with `in_graph`, that a graph replay draws from."""

    def __init__(self, involved: Involved, *, in_graph: bool = False) -> None:
        assert involved.device is not None
        self._device = involved.device
        self._torch: TorchRng = torch_rng_state(self._device)
        self._others = involved.generators.state_of_graphs() if in_graph else involved.generators.state()

    def put_back(self) -> None:
        set_torch_rng_state(self._device, self._torch)
        set_state(self._others)
