"""Weight gradients of the experts in the second half of a split backward.

`torch.distributed.pipelining` splits backward along the autograd graph. The expert block is one node of it, and
autograd does not tell a Python function which gradients are wanted: the block would compute all of them in both
halves. So this module tells it: in `I` it skips the products for its weights, in `W` the product for its input.
"""

from typing import Any

from pagestash.moe.saving import Half
from pagestash.schedules.observe import Observation
from pagestash.schedules.plan import Action, Plan
from pagestash.torch_internals import stages_of


def delay_weight_gradients(schedule: Any) -> Observation:
    """Make the experts of the schedule's stages compute weight gradients only in `W`, until `remove()`.

    Schedules that do not split backward, and stages without experts, are unaffected.
    """
    stages = stages_of(schedule)
    halves = {stage.stage_index: Half() for stage in stages}
    observation = Observation(schedule, _Telling(halves))
    for stage in stages:
        for module in stage.submod.modules():
            if hasattr(module, "use_half"):
                module.use_half(halves[stage.stage_index])
    return observation


class _Telling:
    def __init__(self, halves: dict[int, Half]) -> None:
        self._halves = halves

    def begin_step(self, plan: Plan) -> None:
        pass

    def end_step(self) -> None:
        for half in self._halves.values():
            half.inputs = half.weights = True

    def begin(self, action: Action) -> None:
        # The first stage of a model has no input gradients: its whole backward is the second half.
        split = action.stage > 0
        half = self._halves[action.stage]
        half.inputs = not (split and action.kind == "W")
        half.weights = not (split and action.kind == "I")

    def end(self, action: Action) -> None:
        half = self._halves[action.stage]
        half.inputs = half.weights = True
