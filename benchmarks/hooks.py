"""What a keeper costs the host, hook by hook: saving and asking for a tensor, opening and closing a region.

A stack of small layers is stepped with and without a keeper, under default options but for `min_bytes` (the tensors
are small, so that copies take no time). Layers note the time when forward begins and ends and around the operation
that saves; hooks before and after the keeper's note it around the module's call. All figures are differences from
the step without a keeper, each the time that a tenth of all layers in all steps stay below. On a GPU they are times
of the host, which does not wait. On a CPU offload copies at once, and a stash runs the reference kernels: those
rows say what the bookkeeping costs, and an upper bound of the rest.

Two kinds of whole steps follow. In one, tensors are so small that all time is the host's. In the other, which only
a GPU runs, kernels are short (10 to 150 µs), but last longer than the host takes to launch them without a keeper;
every step finds the device idle.
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter_ns as now
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

import pagestash as ps
from benchmarks.harness import Claim, write
from pagestash.policy import Policy, Rule

WIDTH, ROWS = 64, 16
LAYERS, STEPS = 32, 30
WARM = 5
"""Steps before: in the first ones homes measure, and rules are watched."""
TENSORS = 8
"""Saved by each layer."""

Times = dict[str, int]


class _Save(torch.autograd.Function):
    """Saves tensors, and notes how long it takes to get them back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: Times, *saved: torch.Tensor) -> torch.Tensor:
        ctx.times = times
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        begun = now()
        saved = ctx.saved_tensors
        ctx.times.setdefault("unpack", now() - begun)
        return gradient, None, *(None for _ in saved)


class Layer(nn.Module):
    """Saves `tensors` new tensors, or as many weights; `children` more modules, each with a weight, do nothing."""

    def __init__(self, tensors: int, weights: bool, children: int) -> None:
        super().__init__()
        count = tensors if weights else 1
        self.own = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(count))
        self.parts = nn.ModuleList(nn.Linear(2, 2) for _ in range(children))
        self.times: Times = {}
        self._tensors, self._weights = tensors, weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        note = self.times.setdefault  # what a replay would note comes too late
        note("begin", now())
        saved = list(self.own) if self._weights else [x.detach() + 1.0 for _ in range(self._tensors)]
        before = now()
        x = _Save.apply(x, self.times, *saved)
        note("pack", now() - before)
        del saved
        note("end", now())
        return x


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: int, tensors: int, weights: bool, children: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(tensors, weights, children) for _ in range(layers))
        for layer in self.layers:  # before those of a keeper, and behind them
            layer.register_forward_pre_hook(_called)
            layer.register_forward_hook(_returned)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (
                layer(x) + 1.0
            )  # else one replay would lead to the next: a layer's input would be recomputed, too
        return x.sum()


def _called(layer: nn.Module, args: Any) -> None:
    cast(Layer, layer).times["called"] = now()


def _returned(layer: nn.Module, args: Any, output: Any) -> None:
    cast(Layer, layer).times["returned"] = now()


@dataclass(frozen=True)
class Way:
    """Layers under a rule, and what their rows are called."""

    name: str
    rule: Rule | None
    tensors: int = TENSORS
    weights: bool = False
    children: int = 0


def _layers(home: Any) -> Rule:
    return Rule("layers.*", home, min_bytes=None if home == "recompute" else 0)


ELSEWHERE = Rule("elsewhere", "keep")
"""A rule on a module that never runs."""
WAYS = (
    Way("kept outside all regions", ELSEWHERE),
    Way("kept in a region", _layers("keep")),
    Way("weights in a region", _layers("keep"), weights=True),
    Way("offloaded", _layers("offload")),
    Way("offloaded, one tensor a group", _layers("offload"), tensors=1),
    Way("stashed", _layers("stash")),
    Way("recomputed", _layers("recompute")),
    Way("recomputed, one tensor a region", _layers("recompute"), tensors=1),
    Way("recomputed, 8 modules inside", _layers("recompute"), tensors=1, children=8),
)
Figures = dict[str, float]


def measure(way: Way, rule: Rule | None, device: torch.device, layers: int, steps: int) -> Figures:
    """Microseconds: of a layer's calls and its operation, and of a step's forward and backward."""
    torch.manual_seed(0)
    stack = Stack(layers, way.tensors, way.weights, way.children)
    model = nn.ModuleDict({"stack": stack, "elsewhere": nn.Linear(2, 2)}).to(device)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    keeper = None
    if rule is not None:
        match = rule.match if rule is ELSEWHERE else f"stack.{rule.match}"
        # (`check`: tensors are seen also where nothing moves.)
        policy = Policy([Rule(match, rule.home, min_bytes=rule.min_bytes)])
        keeper = ps.Keeper(policy, check=True).attach(model)
        around = keeper.step
    x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
    samples: dict[str, list[int]] = {}
    for step in range(WARM + steps):
        for layer in stack.layers:
            layer.times.clear()
        _idle(device)
        with around():
            begun = now()
            loss = stack(x)
            turned = now()
            loss.backward()
            done = now()
            del loss
        if step >= WARM:
            for name, values in _spans([layer.times for layer in stack.layers]).items():
                samples.setdefault(name, []).extend(values)
            samples.setdefault("forward", []).append(turned - begun)
            samples.setdefault("backward", []).append(done - turned)
    if keeper is not None:
        keeper.detach()
    return {name: _tenth(values) / 1e3 for name, values in samples.items()}


def _tenth(values: list[Any]) -> float:
    """What a tenth of the values stay below. Not the median: others may use the machine."""
    return float(sorted(values)[len(values) // 10])


def _spans(times: list[Times]) -> dict[str, list[int]]:
    return {
        "enter": [each["begin"] - each["called"] for each in times],
        "pack": [each["pack"] for each in times],
        "leave": [each["returned"] - each["end"] for each in times],
        "unpack": [each["unpack"] for each in times],
        "module": [each["end"] - each["begin"] for each in times],
    }


def cost(way: Way, device: torch.device, layers: int, steps: int) -> dict[str, Any]:
    """The row of one way: what it takes beyond the step without a keeper, in µs."""
    plain, found = (measure(way, rule, device, layers, steps) for rule in (None, way.rule))
    beyond = {name: found[name] - plain[name] for name in plain}
    row: dict[str, Any] = {
        "way": way.name,
        "tensors": way.tensors,
        "pack": beyond["pack"] / way.tensors,
        "unpack": beyond["unpack"] / way.tensors,
        "enter": beyond["enter"],
        "leave": beyond["leave"],
        "layer_forward": beyond["forward"] / layers,
        "layer_backward": beyond["backward"] / layers,
    }
    if way.rule is not None and way.rule.home == "recompute":
        row["replay"] = beyond["unpack"] - plain["module"]
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}


# --- a whole step ---


class Core(nn.Module):
    """Attention itself."""

    def __init__(self, head: int) -> None:
        super().__init__()
        self.head = head

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unflatten(-1, (3, -1, self.head)).transpose(1, -2).unbind(2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


class Block(nn.Module):
    """Attention and a gated layer, of plain operations."""

    def __init__(self, width: int, head: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, False), nn.Linear(width, width, False)
        self.up, self.down = nn.Linear(width, 4 * width, False), nn.Linear(2 * width, width, False)
        self.core, self.act = Core(head), nn.GLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.core(self.qkv(self.norm1(x))))
        return x + self.down(self.act(self.up(self.norm2(x))))


POLICIES = {
    "every layer kept": [Rule("*", "keep")],
    "norms recomputed": [Rule("*.norm1", "recompute"), Rule("*.norm2", "recompute")],
    "norms and activations recomputed, attention offloaded": [
        Rule("*.norm1", "recompute"),
        Rule("*.norm2", "recompute"),
        Rule("*.act", "recompute"),
        Rule("*.core", "offload", min_bytes=0),
    ],
}


def whole_steps(device: torch.device, layers: int, steps: int) -> list[dict[str, Any]]:
    """Steps of a small decoder, whose time is the host's: in µs, and relative to the step without a keeper."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(layers))).to(device)
    x = torch.randn(2, ROWS, WIDTH, device=device, requires_grad=True)
    rows: list[dict[str, Any]] = []
    for name, rules in {"no keeper": None, **POLICIES}.items():
        keeper = None if rules is None else ps.Keeper(Policy(rules)).attach(model)
        times = []
        for _ in range(WARM + steps):
            _idle(device)
            begun = now()
            with nullcontext() if keeper is None else keeper.step():
                model(x).sum().backward()
            times.append((now() - begun) / 1e3)
        if keeper is not None:
            keeper.detach()
        best = min(times[WARM:])
        first = rows[0]["us"] if rows else best
        rows.append({"step": name, "us": round(best, 1), "ratio": round(best / first, 3)})
        print(f"{best:9.0f} µs ({best / first:.3f})  a host-bound step, {name}", flush=True)
    return rows


EAGER = "eager step, keeper over no keeper"
EAGER_WIDTH, EAGER_HEAD, EAGER_TOKENS, EAGER_LAYERS = 2048, 128, 4096, 8
EAGER_POLICIES = {
    "every layer kept": [Rule("*", "keep")],
    "attention offloaded": [Rule("*.core", "offload")],
    "norms recomputed": POLICIES["norms recomputed"],
}


def eager_steps(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """Steps of a decoder with short kernels: the time to their end, relative to the step without a keeper.

    Steps with and without a keeper take turns, so that clocks and neighbours are the same for both. (The
    ratio of the medians is recorded, too.)
    """
    width, head, tokens, layers, steps = EAGER_WIDTH, EAGER_HEAD, EAGER_TOKENS, EAGER_LAYERS, 2 * STEPS
    if quick:
        width, head, tokens, layers, steps = WIDTH, 16, ROWS, 2, 2
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    models = [
        nn.Sequential(*(Block(width, head) for _ in range(layers))).to(device=device, dtype=dtype)
        for _ in range(2)
    ]
    x = torch.randn(2, tokens // 2, width, device=device, dtype=dtype, requires_grad=True)
    rows: list[dict[str, Any]] = []
    for name, rules in EAGER_POLICIES.items():
        keeper = ps.Keeper(Policy(rules)).attach(models[1])
        times: list[list[float]] = [[], []]
        for _ in range(WARM + steps):
            for model, around, taken in zip(models, (nullcontext, keeper.step), times):
                _idle(device)
                begun = now()
                with around():
                    model(x).sum().backward()
                _idle(device)
                taken.append((now() - begun) / 1e3)
        keeper.detach()
        plain, kept = (_tenth(taken[WARM:]) for taken in times)
        step = f"{EAGER}, {name}"
        rows.append({"step": step, "us": round(kept, 1), "ratio": round(kept / plain, 4)})
        medians = [median(taken[WARM:]) for taken in times]
        rows[-1]["median_ratio"] = round(medians[1] / medians[0], 4)
        print(f"{kept:9.0f} µs ({kept / plain:.3f})  {step}", flush=True)
    return rows


def run(out: Path | None = None, quick: bool = False) -> Path:
    """Measure all ways and write the result."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers, steps = (4, 2) if quick else (LAYERS, STEPS)
    gc.collect()
    gc.disable()
    try:
        rows = []
        for way in WAYS:
            rows.append(cost(way, device, layers, steps))
            print(_line(rows[-1]), flush=True)
        whole = whole_steps(device, layers, steps)
        # On a CPU the host computes, too, and no step is the device's alone.
        eager = eager_steps(device, quick) if quick or device.type == "cuda" else []
    finally:
        gc.enable()
    found = claims({row["way"]: row for row in rows}, eager if device.type == "cuda" else [])
    config = {"layers": layers, "steps": steps, "device": device.type}
    if eager:
        config |= {"eager_width": EAGER_WIDTH, "eager_tokens": EAGER_TOKENS, "eager_layers": EAGER_LAYERS}
    return write("hooks", config=config, rows=[*rows, *whole, *eager], claims=found, out=out)


def claims(rows: dict[str, dict[str, Any]], eager: list[dict[str, Any]]) -> list[Claim]:
    """Bars for the hooks' host time, and for eager steps where there are any.

    A step that recomputes has kernels of its own to run, and no bar.
    """
    offloaded, recomputed = rows["offloaded"], rows["recomputed, one tensor a region"]
    without_work = [row for row in eager if not row["step"].endswith("recomputed")]
    return [
        _at_most("pack of a tensor that is kept in a region", rows["kept in a region"]["pack"], 4),
        _at_most("pack of a tensor that is offloaded", offloaded["pack"], 8),
        _at_most("pack of a tensor that is recomputed", rows["recomputed"]["pack"], 8),
        _at_most(f"put of a group of {TENSORS} tensors that is offloaded", offloaded["leave"], 60),
        _at_most("a recorded region's forward", recomputed["enter"] + recomputed["leave"], 88),
        *(Claim(what=row["step"], value=row["ratio"], bar=1.02, better="at most") for row in without_work),
    ]


def _at_most(what: str, value: float, bar: float) -> Claim:
    return Claim(what=f"host time, {what}", value=round(value, 2), bar=bar, better="at most", unit="µs")


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _line(row: dict[str, Any]) -> str:
    figures = "  ".join(f"{name} {value:6.1f}" for name, value in row.items() if isinstance(value, float))
    return f"{row['way']:34} {figures}"
