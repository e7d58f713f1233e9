"""What axolotl and ms-swift call of a plugin, in their order: neither can be installed beside what we test with.

Signatures and order are those of axolotl 0.19.0 (`integrations/base.py`, `loaders/model.py`, `train.py`) and of
ms-swift 4.6.0 (`callbacks/base.py`, `trainers/mixin.py`, `utils/utils.py`).
"""

import importlib
import importlib.util
import sys
import types
from contextlib import nullcontext

import transformers


class BasePlugin:
    """axolotl's, with the methods that a plugin of ours could meet."""

    def __init__(self):
        pass

    def register(self, cfg: dict):
        pass

    def pre_model_load(self, cfg):
        pass

    def post_model_build(self, cfg, model):
        pass

    def pre_lora_load(self, cfg, model):
        pass

    def post_lora_load(self, cfg, model):
        pass

    def post_model_load(self, cfg, model):
        pass

    def post_trainer_create(self, cfg, trainer):
        pass


class TrainerCallback(transformers.TrainerCallback):
    """ms-swift's."""

    def __init__(self, args, trainer):
        self.args = args
        self.trainer = trainer


def install(monkeypatch):
    """Modules under the names that a plugin imports."""
    made = {
        "axolotl": {},
        "axolotl.integrations": {},
        "axolotl.integrations.base": {"BasePlugin": BasePlugin},
        "swift": {},
        "swift.callbacks": {"TrainerCallback": TrainerCallback, "callbacks_map": {}},
    }
    for name, contents in made.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)


class AxolotlTrainer(transformers.Trainer):
    """With the context that axolotl's enters around each step."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.activation_offload_context = nullcontext()

    def training_step(self, *args, **options):
        with self.activation_offload_context:
            return super().training_step(*args, **options)


def axolotl(cfg, load, create):
    """As `axolotl train` runs the plugins of `cfg`: `load()` makes a model, `create(kind, model)` its trainer."""
    plugins = []
    for name in cfg["plugins"]:
        module, _, kind = name.rpartition(".")
        plugins.append(getattr(importlib.import_module(module), kind)())
    for each in plugins:
        each.register(cfg)

    def call(hook, *args):
        for each in plugins:
            getattr(each, hook)(cfg, *args)

    call("pre_model_load")
    model = load()
    call("post_model_build", model)
    if cfg["experts_implementation"] is not None:
        model.set_experts_implementation(cfg["experts_implementation"])
    for hook in ("pre_lora_load", "post_lora_load", "post_model_load"):
        call(hook, model)
    trainer = create(AxolotlTrainer, model)
    trainer.args.gradient_checkpointing = cfg["gradient_checkpointing"]
    call("post_trainer_create", trainer)
    return trainer


def swift(flags, load, create):
    """As `swift sft` with `flags` does: `load(experts)` makes a model, `create(kind, model)` its trainer."""
    spec = importlib.util.spec_from_file_location("_swift_external", flags["external_plugins"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    known = sys.modules["swift.callbacks"].callbacks_map

    class SwiftTrainer(transformers.Trainer):
        def __init__(self, model, args, **options):
            args.gradient_checkpointing = flags["gradient_checkpointing"] == "true"
            callbacks = [known[name](args, self) for name in flags["callbacks"].split()]
            super().__init__(model=model, args=args, callbacks=callbacks, **options)

        def train(self, *args, **options):
            self.model.config.use_cache = False
            asked, self.args.gradient_checkpointing = self.args.gradient_checkpointing, False
            if asked:
                self.model.gradient_checkpointing_enable()
            return super().train(*args, **options)

    return create(SwiftTrainer, load(flags["experts_impl"]))
