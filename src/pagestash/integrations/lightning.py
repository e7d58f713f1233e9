"""Lightning: `Stash`, a callback of its Trainer that gives what training steps save the homes that a policy names.

A keeper's step is one microbatch: it opens before `training_step` and ends after backward. Accumulation, clipping,
the optimizer, validation and checkpoints are no part of one. With Fabric no adapter is needed: a loop of your own
opens `keeper.step()` by itself.
"""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from pagestash.integrations.given import Given, keeper_of
from pagestash.keeper import Keeper


class Stash(Callback):
    """Gives what `training_step` and its backward save the homes that a policy names.

        trainer = Trainer(callbacks=[Stash("policy.toml")])     # or a ps.Policy, or ps.Keeper(budget="40GiB")
        trainer.fit(module)
        print(trainer.callbacks[0].keeper.stats())

    Rules match the names of `module.named_modules()`, or, with `model="net"`, of those in `module.net`. A budget
    needs that, unless `training_step` calls the module itself: it is planned for a model that is called.

    The keeper is attached when fit starts, after `configure_model` and the strategy have sharded the model, and
    detached when it ends. Losses, checkpoints and logs are those of the trainer alone.
    """

    keeper: Keeper | None = None
    """From the start of fit on; its `stats()` stay when fit is over."""

    def __init__(self, policy: Given, *, model: str = "") -> None:
        keeper_of(
            policy, "Stash"
        )  # says what is wrong with it; no keeper yet, which cannot be sent to a process
        self._policy, self._model = policy, model
        self._open = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise ValueError(
                "Stash: with automatic_optimization=False only your training_step knows where forward and backward "
                "are; attach a ps.Keeper there, and open keeper.step() around them"
            )
        keeper = keeper_of(self._policy, "Stash")
        if keeper.awaits_plan and not self._model and type(pl_module).forward is LightningModule.forward:
            kind, parts = type(pl_module).__name__, ", ".join(name for name, _ in pl_module.named_children())
            raise ValueError(
                f"Stash: a budget is planned for the model that training_step calls, and {kind} has no forward; "
                f"say which of its modules that is: Stash(..., model=...), one of {parts}"
            )
        self.keeper = keeper.attach(pl_module.get_submodule(self._model))

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        assert self.keeper is not None
        self._open.close()  # (a module that skips the rest of an epoch has no end of its batch)
        for optimizer in trainer.optimizers:
            self.keeper.count_state_of(optimizer)
        self._open.enter_context(self.keeper.step())

    def on_after_backward(self, *_: Any) -> None:
        self._open.close()

    def on_train_batch_end(self, *_: Any) -> None:
        self._open.close()  # `training_step` returned None: there was no backward

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._open.pop_all().__exit__(type(exception), exception, exception.__traceback__)
        self._detach()

    def teardown(self, *_: Any, **__: Any) -> None:
        self._open.close()
        self._detach()

    def _detach(self) -> None:
        if self.keeper is not None:
            self.keeper.detach()
