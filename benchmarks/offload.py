"""Offload and recompute on slices of published decoders: time and peak memory beside keeping everything.

Eager steps follow one another as in training: the host launches one while the device still runs the one before, and
the first, which finds the device idle and waits for the host, does not count (`ms_alone` is its time).
"""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

import pagestash as ps
from benchmarks.harness import Claim, write
from pagestash.models import Decoder, DecoderConfig, preset
from pagestash.policy import Policy, Rule
from pagestash.sizes import format_bytes

GIB = 2**30
MARGIN = 0.75
"""Of the largest fraction that hides by the profile's estimate, where that is not all of it: the estimate is of an
eager step, and a graph is faster. A claim names the fraction that ran."""


@dataclass(frozen=True)
class Slice:
    """A preset cut to some layers, and its batch; `changes` are to other fields of the preset."""

    preset: str
    layers: int
    batch: int
    length: int
    changes: dict[str, Any] = field(default_factory=dict)

    def config(self) -> DecoderConfig:
        return replace(preset(self.preset), layers=self.layers, **self.changes)


SLICES = (Slice("qwen3-30b-a3b", 8, 2, 4096), Slice("deepseek-v3", 4, 1, 4096))
QUICK = Slice("tiny", 4, 2, 256)

EXPERTS = ("layers.*.moe.expert_fc1", "layers.*.moe.moe_act", "layers.*.attn_norm", "layers.*.mlp_norm")
ATTENTION = ("layers.*.attn.core_attn", "layers.*.attn.attn_proj")
KEEP = [Rule("layers.*", "keep")]
EVERYTHING = {
    "offload everything": {},
    "offload everything but 3 GiB": {"prefetch_bytes": "3GiB"},
}
HIDDEN = ("offload experts and norms", "offload attention")
"""Policies that also run with the fraction of them that hides."""
CHEAP = ("layers.*.moe.moe_act", "layers.*.attn_norm", "layers.*.mlp_norm")


def rules(home: Any, names: tuple[str, ...], **options: Any) -> list[Rule]:
    return [Rule(name, home, **options) for name in names]


def policies() -> dict[str, list[Rule]]:
    """Rules by the name of the policy."""
    return {
        "offload experts and norms": rules("offload", EXPERTS),
        "offload attention": rules("offload", ATTENTION),
        "recompute moe_act and norms, offload the rest": [
            *rules("recompute", CHEAP),
            *rules("offload", ("layers.*.moe.expert_fc1", *ATTENTION, "layers.*.attn.qkv_linear")),
        ],
        "recompute layers": rules("recompute", ("layers.*",)),
        **{name: rules("offload", ("layers.**",), **options) for name, options in EVERYTHING.items()},
    }


class Bench:
    """One model, and the ways to run its step."""

    def __init__(self, which: Slice, device: torch.device) -> None:
        config = which.config()
        torch.manual_seed(0)
        self.slice = which
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = Decoder(config, device=device, dtype=dtype)
        self.tokens = torch.randint(config.vocab, (which.batch, which.length), device=device)
        self.labels = torch.randint(config.vocab, (which.batch, which.length), device=device)

    def step(self) -> torch.Tensor:
        loss, aux = self.model(self.tokens, self.labels)
        (loss + aux).backward()
        return loss.detach()

    def profile(self, repeats: int = 2) -> ps.Profile:
        return ps.profile(self.model, (self.tokens, self.labels), repeats=repeats)

    def measure(self, name: str, chosen: list[Rule] | None, steps: int) -> dict[str, Any]:
        """Time of an eager step, and on a GPU its peak, of which gradients are no part: they are there before."""
        around: Callable[[], AbstractContextManager[Any]] = nullcontext
        keeper = None
        if name == "save_on_cpu":
            around = lambda: save_on_cpu(pin_memory=True)  # noqa: E731
        elif chosen:
            keeper = ps.Keeper(Policy(chosen)).attach(self.model)
            around = keeper.step
        for _ in range(1 if name == "save_on_cpu" else 3):
            with around():
                loss = self.step()
        _quiet()
        on_gpu = self.tokens.is_cuda
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()

        def once() -> None:
            with around():
                self.step()

        row: dict[str, Any] = {
            "preset": self.slice.preset,
            "policy": name,
            "ms": _milliseconds(once, steps),
            "ms_alone": _milliseconds(once, 1, before=0),
            "loss": loss.item(),
        }
        if on_gpu:
            row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        if keeper is not None:
            stats = keeper.stats()
            row["moved_bytes"] = stats.homes["offload"].peak
            row["host_bytes"] = 0 if stats.offload is None else stats.offload.host_bytes
            row["refused_bytes"] = 0 if stats.offload is None else stats.offload.refused_peak
            keeper.detach()
        return row

    def measure_graph(self, name: str, chosen: list[Rule], steps: int) -> dict[str, Any]:
        """Time of the same step as one CUDA graph."""
        for parameter in self.model.parameters():
            parameter.grad = None
        keeper = ps.Keeper(Policy(chosen)).attach(self.model)

        def train_step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss, aux = self.model(tokens, labels)
            (loss + aux).backward()
            for parameter in self.model.parameters():
                parameter.grad = None
            return loss

        graphed = ps.GraphedStep(train_step, keeper)
        for _ in range(4):
            loss = graphed(self.tokens, self.labels)
        milliseconds = _milliseconds(partial(graphed, self.tokens, self.labels), steps)
        keeper.detach()
        del graphed  # with it the graph's memory
        _quiet()
        torch.cuda.empty_cache()
        return {
            "preset": self.slice.preset,
            "policy": f"{name}, in a CUDA graph",
            "ms": milliseconds,
            "loss": loss.item(),
        }


def fitting(found: ps.Profile, chosen: list[Rule]) -> tuple[list[Rule], float]:
    """The rules with the fraction that the profile says will hide, and that fraction; 0.0 if it moves nothing."""
    whole = found.fits(Policy(chosen))
    fraction = 1.0 if whole.fits else round(MARGIN * whole.fraction, 2)
    fitted = [replace(rule, fraction=fraction) for rule in chosen]
    part = whole if fraction in (0.0, 1.0) else found.fits(Policy(fitted))
    for match, why in part.unmoved.items():
        print(f"  rule {match!r} moves nothing: {why}")
    return fitted, fraction if part.moved_bytes else 0.0


def fall_over_moved(keep: dict[str, Any], row: dict[str, Any]) -> float:
    """How far the peak falls, over the bytes that wait on the host."""
    moved = row["moved_bytes"]
    return (keep["peak_bytes"] - row["peak_bytes"]) / moved if moved else 0.0


def run_slice(which: Slice, steps: int) -> tuple[list[dict[str, Any]], list[Claim]]:
    bench = Bench(which, torch.device("cuda"))
    rows = [bench.measure("no keeper", None, steps), bench.measure("keep", KEEP, steps)]
    keep = rows[1]
    claims = []
    for row in rows:
        tell(row, keep)
    found = bench.profile()
    link = found.link
    beside: dict[str, dict[str, Any]] = {}

    def measure(name: str, chosen: list[Rule], *, again: bool = False) -> dict[str, Any]:
        rows.append(bench.measure(name, chosen, steps))
        tell(rows[-1], keep)
        if again:  # clocks drift: what a ratio of one in a hundred is taken of is measured beside it
            beside[name] = bench.measure(f"keep, beside {name}", KEEP, steps)
        return rows[-1]

    for name, chosen in policies().items():
        measure(name, chosen, again=name in HIDDEN)
    for name in HIDDEN:
        chosen, fraction = fitting(found, policies()[name])
        if not fraction:
            print(f"{which.preset}: nothing of {name!r} hides")
            continue
        row = next(row for row in rows if row["policy"] == name)
        if fraction != 1.0:
            row = measure(f"{name}, {fraction:g} of it", chosen, again=True)
        row["fraction"] = fraction
        over = row["ms"] / beside[row["policy"]]["ms"]
        row["saved_over_moved"] = fall_over_moved(keep, row)
        what = f"{which.preset}, {name} as far as it hides ({fraction:g}, {format_bytes(row['moved_bytes'])})"
        claims += [
            at_most(f"{what}: step time over keep", over, 1.01),
            at_least(f"{what}: fall of the peak over the bytes moved", row["saved_over_moved"], 0.99),
        ]
        if name == "offload experts and norms":
            pair = [
                bench.measure_graph("keep", KEEP, steps),
                bench.measure_graph(row["policy"], chosen, steps),
            ]
            rows += pair
            for each in pair:
                tell(each, keep)
            ratio = pair[1]["ms"] / pair[0]["ms"]
            claims.append(at_most(f"{what}: step time over keep, both in a CUDA graph", ratio, 1.01))
    rows += beside.values()
    for row in rows:
        if row["policy"] in EVERYTHING:
            row["link_ms"] = row["moved_bytes"] * (1 / link.out + 1 / link.back) * 1e3
            what = f"{which.preset}, {row['policy']} ({format_bytes(row['moved_bytes'])} moved)"
            ratio = row["ms"] / max(row["link_ms"], keep["ms"])
            claims.append(
                at_most(
                    f"{what}: step time over its bytes' on the link alone, or keep's if longer", ratio, 1.10
                )
            )
    if which.preset != "deepseek-v3":  # there a step of it takes several seconds
        rows.append(bench.measure("save_on_cpu", None, 1))
        tell(rows[-1], keep)
    if len({row["loss"] for row in rows}) != 1:
        raise RuntimeError(f"losses differ: { {row['policy']: row['loss'] for row in rows} }")
    return rows, claims


def run(out: Path | None = None, quick: bool = False) -> Path:
    """Measure all policies on both slices and write the result."""
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    slices = (QUICK,) if quick else SLICES
    for count, which in enumerate(slices, 1):
        found, promised = run_slice(which, 3 if quick else 6)
        rows += found
        claims += promised
        _quiet()
        torch.cuda.empty_cache()
        done = [vars(one) for one in slices[:count]]
        config = {"slices": done, "dtype": "bfloat16", "margin": MARGIN}
        path = write("offload", config=config, rows=rows, claims=claims, out=out)  # what there is so far
    return path


def tell(row: dict[str, Any], keep: dict[str, Any]) -> None:
    peak = f"{row['peak_bytes'] / GIB:6.2f} GiB peak" if "peak_bytes" in row else ""
    moved = f", {row['moved_bytes'] / GIB:.2f} GiB moved" if row.get("moved_bytes") else ""
    print(
        f"{row['preset']:14} {row['ms']:8.1f} ms ({row['ms'] / keep['ms']:.3f}) {peak}{moved}  {row['policy']}"
    )


def _milliseconds(step: Callable[[], Any], steps: int, before: int = 1) -> float:
    """The time of one of several steps in a row, `before` of which come first and do not count."""
    if not torch.cuda.is_available():
        for _ in range(before):
            step()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - began) * 1e3 / steps
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    for number in range(before + steps):
        if number == before:
            start.record()
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps


def _quiet() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def at_most(what: str, value: float, bar: float) -> Claim:
    return Claim(what=what, value=round(value, 4), bar=bar, better="at most")


def at_least(what: str, value: float, bar: float) -> Claim:
    return Claim(what=what, value=round(value, 4), bar=bar, better="at least")
