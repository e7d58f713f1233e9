"""The models of `benchmarks.plan`, and the policies that one would write for them by hand."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pagestash as ps
from pagestash.models import Decoder, preset

EXAMPLES = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True, kw_only=True)
class Case:
    preset: str
    layers: int
    batch: int
    sequence: int

    @property
    def name(self) -> str:
        return f"{self.preset}, {self.layers} layers"

    norms = ("layers.*.attn_norm", "layers.*.mlp_norm")
    core = ("layers.*.attn.core_attn", "layers.*.attn.attn_proj")
    layer = "layers.*"
    examples = ("offload", "stash", "stash_and_recompute")
    graphed: bool = False
    """Whether it is planned and measured as a CUDA graph, too."""
    waiting: bool = False
    """Whether it is planned and measured for a loop that waits, too."""

    def build(self, device: torch.device) -> tuple[nn.Module, Any]:
        """The model and its batch."""
        config = preset(self.preset, self.layers)
        model = Decoder(
            config, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
        )
        model.initialise(0)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, config.vocab, (self.batch, self.sequence + 1), generator=generator)
        tokens = tokens.to(device)
        return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@dataclass(frozen=True, kw_only=True)
class HuggingFaceCase(Case):
    """The slice of `hf_step`, after `pagestash.hf.optimize`."""

    preset: str = "Hugging Face Qwen3-30B-A3B"
    layers: int = 8
    batch: int = 2
    sequence: int = 4096
    graphed: bool = True

    norms = ("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm")
    core = ("model.layers.*.self_attn.core_attn", "model.layers.*.self_attn.o_proj")
    layer = "model.layers.*"
    examples = ("huggingface",)

    def build(self, device: torch.device) -> tuple[nn.Module, Any]:
        import pagestash.hf
        from benchmarks import hf_step

        shape = hf_step.Slice(layers=self.layers, sequences=self.batch, sequence=self.sequence)
        model = hf_step.build(shape, device, torch.bfloat16, "pagestash")
        pagestash.hf.optimize(model)
        tokens = shape.tokens(device)
        return model, {"input_ids": tokens, "labels": tokens}


CASES: tuple[Case, ...] = (
    HuggingFaceCase(),
    Case(preset="qwen3-30b-a3b", layers=8, batch=2, sequence=4096, graphed=True, waiting=True),
    Case(preset="deepseek-v3", layers=4, batch=1, sequence=4096),
    Case(preset="gpt-oss-20b", layers=4, batch=2, sequence=4096),
)
QUICK = (Case(preset="tiny", layers=2, batch=4, sequence=128),)


def by_hand(case: Case, profile: ps.Profile) -> dict[str, ps.Policy]:
    """Policies that one would write without a plan."""

    def offload(fraction: float = 1.0) -> ps.Policy:
        return ps.Policy(
            [ps.Rule(match, "offload", min_bytes=1024, fraction=fraction) for match in case.core]
        )

    found = {
        "keep": ps.Policy(),
        "recompute norms": ps.Policy([ps.Rule(match, "recompute") for match in case.norms]),
        "recompute layers": ps.Policy([ps.Rule(case.layer, "recompute")]),
    }
    fraction = profile.fits(offload()).fraction
    if fraction:
        found["offload as far as it hides"] = offload(fraction)
    return found | {
        f"examples/{name}.toml": ps.Policy.load(EXAMPLES / f"{name}.toml") for name in case.examples
    }
