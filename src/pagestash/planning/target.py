"""A budget to plan for in the middle of training: a call of the model is measured, and all is left as it was."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from pagestash.planning.budget import check_budget, check_step, parse_host
from pagestash.planning.make import plan as make_plan
from pagestash.planning.measure import Measuring
from pagestash.planning.result import Plan
from pagestash.policy import Policy, Rule
from pagestash.profiling.layers import layer_names
from pagestash.profiling.measure import Arguments, Loss
from pagestash.profiling.progress import Progress
from pagestash.saved.compiled import is_compiled, is_wrapper
from pagestash.saved.first_call import FirstCall, has_gradients
from pagestash.saved.recompute.references import References
from pagestash.saved.recompute.rng import python_rng_state, set_python_rng_state
from pagestash.saved.storage import plain_storage
from pagestash.torch_internals import accumulate_hooks_of, modules_in

ONE_FORWARD = (
    "Keeper(budget=...) plans for one forward and its backward at a time, and here several forwards wait for "
    "theirs; use ps.plan on a module that runs all of them, or write a policy"
)


@dataclass(frozen=True, slots=True)
class Target:
    """What to plan for, and how to measure; as in `ps.plan`."""

    budget: str | float
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    host: str | int = "auto"
    repeats: int = 3
    progress: Progress = None
    measure: Measuring = "auto"
    graphed: bool = False
    waits: bool = False

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_step(self.loss, self.optimizer)
        parse_host(self.host)
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats}: expected at least 1")

    def check(self, model: nn.Module) -> None:
        """Raise for a model that cannot be measured in the middle of training."""
        if is_compiled(model) and not is_wrapper(model):
            raise ValueError(
                "Keeper(budget=...): model.compile() hides the model's calls; attach torch.compile(model) instead, "
                "or compile its layers"
            )
        for name, parameter in model.named_parameters():
            if accumulate_hooks_of(parameter):
                raise ValueError(
                    f"Keeper(budget=...): {name} has a hook that runs when its gradient is ready, perhaps an "
                    "optimizer's; the measured steps would run it, too. Use ps.plan before it is registered"
                )

    def begins_with(self, model: nn.Module) -> Policy:
        """The policy of the first step, which nobody has measured: layers are recomputed, so that it fits."""
        return Policy([Rule(name, "recompute") for name in layer_names(model)])

    def plan(self, first: FirstCall) -> Plan:
        """The plan for the call that was seen."""
        model, call = first.model, first.call
        assert call is not None
        self.check(model)
        if first.overlaps:
            raise ValueError(ONE_FORWARD)
        held = first.gradients_held or has_gradients(model)
        with _as_before(model, first.written):
            plan = make_plan(
                model,
                Arguments(call.args, call.kwargs),
                budget=self.budget,
                loss=self.loss,
                optimizer=self.optimizer,
                host=self.host,
                autocast=call.autocast,
                repeats=self.repeats,
                gradients="held" if held else "fresh",
                progress=self.progress,
                measure=self.measure,
                graphed=self.graphed,
                waits=self.waits,
            )
        if any(parameter.is_cuda for parameter in model.parameters()):
            torch.cuda.empty_cache()  # steps under the policy need not reserve what the measured ones did
        return plan


@contextmanager
def _as_before(model: nn.Module, written: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restores what `profile` does not: generators of Python and NumPy, what attributes and buffers refer to, and
    the weights that forward has `written`."""
    random = python_rng_state()
    modules = modules_in(model)
    references = References(modules)
    tensors = [v for module in modules for v in vars(module).values() if isinstance(v, torch.Tensor)]
    copies = _copies(model, tensors)
    weights = [(weight, weight.data, weight.detach().cpu().clone()) for weight in written]
    try:
        yield
    finally:
        references.put_back()
        set_python_rng_state(random)
        for memory, copy in copies:
            if not torch.equal(memory.cpu(), copy):
                memory.copy_(copy)
        for weight, memory, values in weights:
            weight.data = memory.copy_(values)


def _copies(model: nn.Module, tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The memory of these tensors as bytes, and a copy of it on the host; not of parameters and buffers."""
    known = {plain_storage(each) for each in chain(model.parameters(), model.buffers())}
    found = []
    for tensor in tensors:
        key = plain_storage(tensor)
        if key is not None and key not in known and not tensor.is_meta:
            known.add(key)
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            found.append((memory, memory.cpu().clone()))
    return found
