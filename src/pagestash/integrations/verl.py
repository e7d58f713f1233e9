"""verl: a policy for the training steps of its FSDP engines (actor and critic).

    VERL_USE_EXTERNAL_MODULES=pagestash.integrations.verl PAGESTASH_POLICY=policy.toml python -m verl.trainer...

verl imports this module in each of its processes. A keeper's step is one `forward_backward_batch`, with all of its
microbatches; log-probabilities and values, which are computed without gradients, are no part of one.
"""

import os
from functools import wraps
from typing import Any

from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from pagestash.keeper import Keeper
from pagestash.policy import Policy

PLACE = "PAGESTASH_POLICY"
"""The variable that names the file of the policy."""


def keeper_of(engine: Any) -> Keeper:
    """The keeper of this engine's model, made and attached at the first call. A `ValueError` for what undoes it."""
    if not hasattr(engine, "keeper"):
        for setting in ("enable_activation_offload", "enable_gradient_checkpointing"):
            if getattr(engine.model_config, setting):
                raise ValueError(
                    f"pagestash: {setting}=True takes what is saved before a rule sees it; set it to False, and "
                    "say in the policy what is offloaded and recomputed"
                )
        engine.keeper = Keeper(Policy.load(os.environ[PLACE])).attach(engine.module)
    return engine.keeper


def _in_steps(inner: Any) -> Any:
    @wraps(inner)
    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        if forward_only or PLACE not in os.environ:
            return inner(self, data, loss_function, forward_only=forward_only)
        with keeper_of(self).step():
            return inner(self, data, loss_function, forward_only=False)

    return forward_backward_batch


FSDPEngine.forward_backward_batch = _in_steps(FSDPEngine.forward_backward_batch)
