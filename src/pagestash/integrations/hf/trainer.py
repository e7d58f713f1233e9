"""`wrap`: a policy for the training steps of a `Trainer` of transformers, and of those of TRL that derive from it.

A keeper's step is one `training_step`: the forward and backward of one microbatch. What the trainer does around it
(accumulation, clipping, the optimizer, evaluation, checkpoints) is no part of a step, and neither is
`_prepare_inputs` inside it, where trainers of reinforcement learning generate.
"""

from pathlib import Path
from types import MethodType
from typing import Any

import torch

from pagestash.integrations.hf.experts import NAME, implementation, is_experts
from pagestash.integrations.hf.report import patched_already
from pagestash.policy import Policy
from pagestash.saved.keeper import Keeper
from pagestash.saved.names import plain_names

BRACKETED = ("training_step", "_prepare_inputs")


def wrap(trainer: Any, policy: Policy | str | Path) -> Keeper:
    """Give what `trainer` saves in its training steps the homes that `policy`, or the file of one, names.

        keeper = pagestash.hf.wrap(trainer, "policy.toml")
        trainer.train()
        print(keeper.stats())

    Call it before `trainer.train()`. Losses, checkpoints and logs are those of the trainer alone. A `ValueError`
    says what does not go together, and leaves trainer and model as they were.
    """
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise ValueError(
            f"wrap: expected a Trainer of transformers or one that derives from it, got {type(trainer).__name__}; "
            "in a loop of your own use ps.Keeper(policy).attach(model)"
        )
    if "training_step" in trainer.__dict__:
        raise ValueError(
            "wrap: the trainer has a training_step of its own already; unwrap(trainer) takes ours off"
        )
    policy = policy if isinstance(policy, Policy) else Policy.load(policy)
    _refuse_settings(trainer.args)
    model: Any = trainer.model
    _refuse_replaced_experts(model)
    keeper = Keeper(policy).attach(model)
    theirs = {name: getattr(trainer, name) for name in BRACKETED}

    def training_step(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        with keeper.step():
            return theirs["training_step"](*args, **options)

    def _prepare_inputs(self: Any, *args: Any, **options: Any) -> Any:
        with keeper.aside():
            return theirs["_prepare_inputs"](*args, **options)

    for name, ours in zip(BRACKETED, (training_step, _prepare_inputs)):
        setattr(trainer, name, MethodType(ours, trainer))
    return keeper


def unwrap(trainer: Any, keeper: Keeper) -> None:
    """Take off what `wrap` put on: the trainer runs as before, and the model has no hooks of `keeper`."""
    keeper.detach()
    for name in BRACKETED:
        trainer.__dict__.pop(name, None)


def _refuse_settings(args: Any) -> None:
    """Settings of a trainer that would undo a policy, or be undone by it."""
    if args.gradient_checkpointing:
        raise ValueError(
            "wrap: gradient_checkpointing=True recomputes every layer, and saves nothing that a rule could move; "
            "set gradient_checkpointing=False, and say in the policy what is recomputed"
        )
    if getattr(args, "activation_offloading", False):
        raise ValueError(
            "wrap: activation_offloading=True takes all saved tensors to the host before a rule sees them; "
            "set activation_offloading=False, and say in the policy what is offloaded"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"wrap: the trainer would run copies of the model in threads on {args.n_gpu} GPUs; start one process "
            "for each GPU with torchrun or accelerate launch"
        )


def _refuse_replaced_experts(model: torch.nn.Module) -> None:
    """Experts that were to be ours and that another library has taken since."""
    for name, module in plain_names(model):
        if is_experts(module) and implementation(module) == NAME:
            why = patched_already(module)
            if why is not None:
                raise ValueError(
                    f"wrap: {name}: {why}, so experts_implementation={NAME!r} has no effect; with Liger, set "
                    "liger_kernel_config={'swiglu': False}"
                )
