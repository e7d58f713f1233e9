"""LoRA on attention and experts of a slice of Qwen3-30B-A3B: PEFT's own, and after `pagestash.hf.optimize`.

    python -m benchmarks hf_lora

Weights, tokens, time and memory are those of `hf_step`. All models are there at once, and rounds of steps go over
them in turn. The fastest round of each counts: adapters make a step of many small kernels, which takes half as long
again while the host is slow.
"""

import gc
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch

import pagestash as ps
from benchmarks.harness import Claim, write
from benchmarks.hf_step import (
    GIB,
    POLICY,
    QUICK,
    Slice,
    build,
    checkpointed,
    held_bytes,
    multiplied_by,
    optimized,
    step,
    timed,
)

PLAIN, CHECKPOINTED = "LoRA: PEFT, grouped_mm", "LoRA: PEFT, gradient checkpointing"
OURS, POLICED = "LoRA: PEFT, optimize(model)", "LoRA: optimize(model), huggingface.toml"
WARM = 4
"""Gradients are there after the first step, and a policy has its plan after the second."""


def adapted(shape: Slice, device: torch.device, dtype: torch.dtype, experts: str) -> Any:
    """The slice with adapters of rank 16, whose B are no zeros: these would hide their half."""
    config = peft.LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = peft.get_peft_model(build(shape, device, dtype, experts), config).train()
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    return model


def ways(shape: Slice, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Each way's model, and its keeper or None, made when it is called."""
    make = partial(adapted, shape, device, dtype)
    return {
        PLAIN: lambda: (make("grouped_mm"), None),
        CHECKPOINTED: lambda: (checkpointed(make("grouped_mm")), None),
        OURS: lambda: optimized(make("pagestash")),
        POLICED: lambda: optimized(make("pagestash"), ps.Policy.load(POLICY)),
    }


class Bench:
    """One way, warmed up, with the peak of its steps above its weights and gradients."""

    def __init__(self, make: Callable[[], tuple[Any, Any]], tokens: torch.Tensor) -> None:
        gc.collect()
        others = torch.cuda.memory_allocated() if tokens.is_cuda else 0
        self.model, self.keeper = make()
        self.tokens = tokens
        self.medians: dict[str, list[float]] = {"ms": [], "fresh_ms": []}
        for _ in range(WARM):
            self.step()
        if tokens.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        self.loss = self.step().item()
        peak = torch.cuda.max_memory_allocated() if tokens.is_cuda else 0
        self.gib = (peak - others - held_bytes(self.model)) / GIB if tokens.is_cuda else 0.0

    def step(self) -> torch.Tensor:
        return step(self.model, self.keeper, self.tokens)

    def fresh(self) -> torch.Tensor:
        self.model.zero_grad()
        return self.step()

    def round(self, repeats: int) -> None:
        """Some steps that find gradients in place, and some that do not."""
        for name, run in (("ms", self.step), ("fresh_ms", self.fresh)):
            self.medians[name].append(statistics.median(timed(run, self.tokens, warm=1, repeats=repeats)))

    def row(self) -> dict[str, Any]:
        fastest = {name: min(found) for name, found in self.medians.items()}
        products = multiplied_by(self.model, self.tokens.device)
        return {
            **fastest,
            "products": products,
            "gib": self.gib,
            "loss": self.loss,
            "round_ms": self.medians["ms"],
        }


def compare(
    shape: Slice, device: torch.device, dtype: torch.dtype, *, rounds: int = 5, repeats: int = 5
) -> list[dict[str, Any]]:
    """A row for each way."""
    tokens = shape.tokens(device)
    benches = {name: Bench(make, tokens) for name, make in ways(shape, device, dtype).items()}
    for number in range(rounds):
        for name, bench in benches.items():
            bench.round(repeats)
            print(f"{name:<42}{bench.medians['ms'][-1]:8.1f} ms, round {number + 1} of {rounds}", flush=True)
    rows = [{"way": name, **bench.row()} for name, bench in benches.items()]
    for row in rows:
        shown = "{way:<42}{ms:8.1f} ms{gib:7.2f} GiB  fresh {fresh_ms:.1f} ms  loss {loss:.5f}"
        print(shown.format(**row), flush=True)
    return rows


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    by = {row["way"]: row for row in rows}
    ours, theirs = by[OURS], by[PLAIN]
    what = (
        "Qwen3-30B-A3B in transformers, 8 layers, 2 × 4,096 tokens: "
        "LoRA on attention and experts, over PEFT's own"
    )
    return [
        Claim(what=f"{what}: time", value=ours["ms"] / theirs["ms"], bar=0.42, better="at most"),
        Claim(what=f"{what}: peak", value=ours["gib"] / theirs["gib"], bar=0.19, better="at most"),
    ]


def run(out: Path | None = None, quick: bool = False) -> Path:
    shape = QUICK if quick else Slice()
    rounds, repeats = (1, 2) if quick else (5, 5)
    rows = compare(shape, torch.device("cuda"), torch.bfloat16, rounds=rounds, repeats=repeats)
    claims = [] if quick else claims_of(rows)
    config = asdict(shape) | {"rounds": rounds, "repeats": repeats}
    return write("hf_lora", config=config, rows=rows, claims=claims, out=out)
