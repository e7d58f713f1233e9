"""Steps with a policy, or without one, from the same state each time, and all that they compute."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from pagestash.keeper import Keeper
from pagestash.policy import Policy
from pagestash.profiling.steps import RepeatedStep
from pagestash.step.graphed import GraphedStep
from pagestash.verifying.contents import Container, Item, Kind, contents
from pagestash.verifying.state import State, generator_states, torch_states


class Key(NamedTuple):
    """What a step has computed: `Key(2, "gradient", "layers.3.norm.weight")`."""

    step: int
    kind: Kind
    name: str


See = Callable[[Key, Any], None]
"""Is given each result: a tensor, or for generators, arrays and attributes what can be compared."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of `step`, each from the state in which it found everything."""

    step: RepeatedStep
    optimizer: torch.optim.Optimizer | None
    steps: int
    graphed: bool
    regions: Sequence[str]
    backend: str

    def contents(self) -> list[Item]:
        arguments = {"batch": (self.step.args, self.step.kwargs), "loss": self.step.loss}
        return contents(self.step.model, self.optimizer, arguments)

    def state(self) -> State:
        return State(self.contents(), self.step.model, self.step.device)

    def run(self, policy: Policy | None, see: See) -> dict[str, int]:
        """Run all steps; the bytes that waited in each home at the peak, where there is a policy."""
        keeper = None
        if policy is not None or self.graphed:
            keeper = Keeper(policy or Policy(), backend=self.backend)
        try:
            if keeper is not None:
                keeper.attach(self.step.model, self.regions)
            leaves = self._leaves()
            run = self._graphed(keeper, leaves) if self.graphed else self._eager(keeper, leaves)
            for number in range(1, self.steps + 1):
                for leaf in leaves.values():
                    leaf.grad = None
                loss, gradients = run()
                see(Key(number, "loss", "loss"), loss)
                # Backward comes to the last module first.
                for name, gradient in reversed(list(zip(leaves, gradients))):
                    if gradient is not None:
                        see(Key(number, "gradient", name), gradient)
                self._see_state(number, see)
            moved = {} if keeper is None else _moved(keeper)
        finally:
            if keeper is not None:
                keeper.detach()
        for name, kind, value in self.contents():
            if kind in ("attribute", "argument") and "_hooks" not in name:
                see(Key(self.steps, kind, name), _plain(value) if isinstance(value, Container) else value)
        return moved

    def _leaves(self) -> dict[str, torch.Tensor]:
        """The tensors that get gradients, by name: parameters, and inputs that want one."""
        return {
            item.name: item.value
            for item in self.contents()
            if isinstance(item.value, torch.Tensor) and item.value.is_leaf and item.value.requires_grad
        }

    def _eager(self, keeper: Keeper | None, leaves: dict[str, torch.Tensor]) -> Callable[[], Any]:
        def run() -> tuple[torch.Tensor, list[torch.Tensor | None]]:
            loss = self.step.run_once(nullcontext() if keeper is None else keeper.step())
            gradients = [leaf.grad for leaf in leaves.values()]
            if self.optimizer is not None:
                self.optimizer.step()
            return loss, gradients

        return run

    def _graphed(self, keeper: Keeper | None, leaves: dict[str, torch.Tensor]) -> Callable[[], Any]:
        assert keeper is not None
        step, optimizer = self.step, self.optimizer

        def train_step(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
            loss = replace(step, args=args, kwargs=kwargs).run_once(nullcontext())
            gradients = [leaf.grad for leaf in leaves.values()]
            if optimizer is not None:
                optimizer.step()
            return loss, gradients

        graphed = GraphedStep(
            train_step, keeper, optimizer=() if optimizer is None else optimizer, graph=True
        )

        def run() -> Any:
            found = graphed(*step.args, **step.kwargs)
            graphed.wait()
            return found

        return run

    def _see_state(self, number: int, see: See) -> None:
        items = self.contents()
        for wanted in ("parameter", "buffer", "optimizer state"):
            for name, kind, value in items:
                if kind == wanted and isinstance(value, torch.Tensor):
                    see(Key(number, kind, name), value)
        for device, state in torch_states().items():
            see(Key(number, "random state", f"torch's generator ({device})"), state)
        names = {id(item.value): item.name for item in items}
        for generator, state in generator_states(item.value for item in items):
            name = names.get(id(generator)) or f"the generator of {generator.__name__}"
            see(Key(number, "random state", name), state)


def _moved(keeper: Keeper) -> dict[str, int]:
    homes = keeper.stats().homes
    return {name: each.peak for name, each in homes.items() if name != "keep" and each.peak}


def _plain(value: Any) -> Any:
    """What can be compared of a container: numbers and strings, and of all else the class."""
    if isinstance(value, dict):
        return [(_name(key), _name(each)) for key, each in value.items()]
    return [_name(each) for each in (sorted(value, key=repr) if isinstance(value, set) else value)]


def _name(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__
