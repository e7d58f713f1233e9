"""`wrap`: a policy for the training steps of a `Trainer` of transformers, and of those of TRL that derive from it.

A keeper's step is one `training_step`: the forward and backward of one microbatch. TRL's trainers enter a context
around it, in whose place ours is put; of other trainers the method is bracketed. What the trainer does around it
(accumulation, clipping, the optimizer, evaluation, checkpoints) is no part of a step, and neither is
`_prepare_inputs` inside it, where trainers of reinforcement learning generate.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MethodType
from typing import Any

import torch

from pagestash.integrations.given import Given, keeper_of
from pagestash.integrations.hf.experts import NAME, implementation, is_experts, taken
from pagestash.keeper import Keeper
from pagestash.saved.names import plain_names

BRACKETED = ("training_step", "_prepare_inputs")
CONTEXT = "maybe_activation_offload_context"
"""The attribute of TRL's trainers that they enter around each `training_step`."""


def wrap(trainer: Any, policy: Given) -> Keeper:
    """Give what `trainer` saves in its training steps the homes that `policy`, or the file of one, names.

        keeper = pagestash.hf.wrap(trainer, "policy.toml")    # or a budget, like "40GiB", to plan one for
        trainer.train()
        print(keeper.stats())

    Call it before `trainer.train()`. A plan counts the state of the trainer's optimizer. Losses, checkpoints and
    logs are those of the trainer alone. A `ValueError` says what does not go together, and leaves trainer and model
    as they were.
    """
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise ValueError(
            f"wrap: expected a Trainer of transformers or one that derives from it, got {type(trainer).__name__}; "
            "in a loop of your own use ps.Keeper(policy).attach(model)"
        )
    if "_prepare_inputs" in trainer.__dict__:
        raise ValueError("wrap: the trainer is wrapped already; unwrap(trainer, keeper) takes ours off")
    keeper = keeper_of(policy, "wrap", waits=trainer.args.logging_nan_inf_filter)  # which reads each loss
    _refuse_settings(trainer)
    model: Any = trainer.model
    _refuse_taken_experts(model, trainer.args)
    keeper.attach(model)
    theirs = {name: getattr(trainer, name) for name in BRACKETED}

    def step() -> AbstractContextManager[None]:
        if trainer.optimizer is not None:  # accelerate's, around the real one
            keeper.count_state_of(getattr(trainer.optimizer, "optimizer", trainer.optimizer))
        return keeper.step()

    def training_step(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        with step():
            return theirs["training_step"](*args, **options)

    def _prepare_inputs(self: Any, *args: Any, **options: Any) -> Any:
        with keeper.aside():
            return theirs["_prepare_inputs"](*args, **options)

    for name, ours in zip(BRACKETED, (training_step, _prepare_inputs)):
        if name == "training_step" and hasattr(trainer, CONTEXT):
            setattr(trainer, CONTEXT, _Steps(step))
        else:
            setattr(trainer, name, MethodType(ours, trainer))
    return keeper


def unwrap(trainer: Any, keeper: Keeper) -> None:
    """Take off what `wrap` put on: the trainer runs as before, and the model has no hooks of `keeper`."""
    keeper.detach()
    if isinstance(getattr(trainer, CONTEXT, None), _Steps):
        setattr(trainer, CONTEXT, nullcontext())
    for name in BRACKETED:
        trainer.__dict__.pop(name, None)


class _Steps(AbstractContextManager[None]):
    """The keeper's step as a context that is entered again and again."""

    def __init__(self, step: Callable[[], AbstractContextManager[None]]) -> None:
        self._step = step
        self._open = ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(self._step())

    def __exit__(self, *raised: Any) -> bool | None:
        return self._open.__exit__(*raised)


def _refuse_settings(trainer: Any) -> None:
    """Settings of a trainer that would undo a policy, or be undone by it."""
    args = trainer.args
    if getattr(trainer, "model_init", None) is not None:
        raise ValueError(
            "wrap: model_init= makes another model when training begins, which no policy is attached to; "
            "pass model= to the trainer"
        )
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
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.activation_checkpointing:
        raise ValueError(
            "wrap: activation_checkpointing in fsdp_config recomputes every layer, and saves nothing that a rule "
            "could move; set it to False, and say in the policy what is recomputed"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"wrap: the trainer would run copies of the model in threads on {args.n_gpu} GPUs; start one process "
            "for each GPU with torchrun or accelerate launch"
        )


def _refuse_taken_experts(model: torch.nn.Module, args: Any) -> None:
    """Experts that were to be ours and that another library has taken, or takes when training begins."""
    for name, module in plain_names(model):
        if (why := taken(module)) is not None and NAME in (implementation(module), implementation(model)):
            raise ValueError(f"wrap: {name}: {why}")
        if is_experts(module) and implementation(module) == NAME and _liger_takes_experts(model, args):
            raise ValueError(
                f"wrap: use_liger_kernel=True replaces {name} when training begins (its swiglu), so "
                f"experts_implementation={NAME!r} has no effect; set liger_kernel_config={{'swiglu': False}}"
            )


def _liger_takes_experts(model: Any, args: Any) -> bool:
    """Whether Liger, which the trainer applies when training begins, is to replace the experts."""
    if not getattr(args, "use_liger_kernel", False):
        return False
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    applies = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
    swiglu = inspect.signature(applies).parameters.get("swiglu") if applies is not None else None
    return swiglu is not None and (args.liger_kernel_config or {}).get("swiglu", swiglu.default)
