"""Everything that a step changes, as named tensors, to save in a checkpoint and to load bit-identically."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pagestash.models.decoder import Decoder
from pagestash.moe.parts import ExpertLinear
from pagestash.train.parallel import RunRanks


@dataclass(slots=True)
class TrainState:
    """The model, its optimizer and the random state of a run."""

    models: Sequence[Decoder]
    """The model, or this rank's stages of it."""
    optimizer: torch.optim.Optimizer
    ranks: RunRanks

    def gather(self) -> dict[str, dict[str, torch.Tensor]]:
        """All tensors, whole and on the host, for the first rank; every rank must call this."""
        first, ranks = self.ranks.world.peer == 0, self.ranks
        model, optimizer = {}, {}
        experts = self._expert_names()
        for name, value in self._values().items():
            whole = ranks.whole(value, expert=name in experts)
            if first:
                model[name] = whole
        for name, parameter in self._parameters().items():
            for key, value in sorted(self.optimizer.state[parameter].items()):
                whole = ranks.whole(value, expert=name in experts)
                if first:
                    optimizer[f"{key}/{name}"] = whole
        model, optimizer = ranks.together(model), ranks.together(optimizer)
        return {"model": model, "optimizer": optimizer, "random": dict(self._random())}

    @torch.no_grad()
    def load(self, checkpoint: Path) -> None:
        """Load this rank's part of a checkpoint's tensors."""
        experts, device = self._expert_names(), str(self.ranks.device)
        with safe_open(checkpoint / "model.safetensors", "pt") as file:
            for name, value in self._values().items():
                value.copy_(self.ranks.part(file.get_tensor(name), value, expert=name in experts))
        names = self._parameters()
        with safe_open(checkpoint / "optimizer.safetensors", "pt") as file:
            for entry in file.keys():  # noqa: SIM118
                key, _, name = entry.partition("/")
                if name not in names:  # on another stage
                    continue
                part = self.ranks.part(file.get_tensor(entry), names[name], expert=name in experts)
                # A copy: the tensor is a mapped file, which the run will delete.
                self.optimizer.state[names[name]][key] = part.clone()
        with safe_open(checkpoint / "random.safetensors", "pt") as file:
            torch.set_rng_state(file.get_tensor("cpu"))
            if "cuda" in file.keys() and device.startswith("cuda"):  # noqa: SIM118
                torch.cuda.set_rng_state(file.get_tensor("cuda"), self.ranks.device)

    def _values(self) -> dict[str, torch.Tensor]:
        return {name: value for model in self.models for name, value in model.state_dict().items()}

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: value for model in self.models for name, value in model.named_parameters()}

    def _expert_names(self) -> set[str]:
        """The names of the experts' parameters, which differ between expert-parallel ranks."""
        return {
            f"{prefix}.{name}"
            for model in self.models
            for prefix, module in model.named_modules()
            if isinstance(module, ExpertLinear)
            for name, _ in module.named_parameters(recurse=False)
        }

    def _random(self) -> Iterator[tuple[str, torch.Tensor]]:
        # A step draws no random numbers, so the first rank's state serves all.
        yield "cpu", torch.get_rng_state()
        if self.ranks.device.type == "cuda":
            yield "cuda", torch.cuda.get_rng_state(self.ranks.device)


def make_optimizer(models: Sequence[Decoder], config: Any) -> torch.optim.AdamW:
    """AdamW, fused if possible; norms and biases have no weight decay."""
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for module in (module for model in models for module in model.modules()):
        for name, parameter in module.named_parameters(recurse=False):
            decays = parameter.ndim > 1 and "bias" not in name
            # Experts may be sharded over other ranks than the rest; a fused update takes one kind of sharding.
            groups.setdefault((decays, isinstance(module, ExpertLinear)), []).append(parameter)
    settings: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": config.weight_decay if decays else 0.0}
        for (decays, _), parameters in groups.items()
    ]
    fused = next(models[0].parameters()).device.type in ("cpu", "cuda")
    return torch.optim.AdamW(settings, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused)
