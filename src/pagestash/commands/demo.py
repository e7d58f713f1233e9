"""`pagestash demo`: profile a small MoE decoder, plan for half of its activations, train with and without the plan.

*Activations* are what a step allocates beside weights, gradients and optimizer state: saved tensors and workspace.
"""

import importlib.util
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pagestash.commands.checks import exit_code
from pagestash.commands.options import DemoOptions
from pagestash.models.config import DecoderConfig
from pagestash.models.decoder import Decoder
from pagestash.planning.budget import base_bytes, optimizer_state
from pagestash.planning.make import plan_profile
from pagestash.planning.predict import predict
from pagestash.planning.prediction import Prediction
from pagestash.planning.result import Plan
from pagestash.policy import Policy
from pagestash.profiling.measure import profile
from pagestash.profiling.memory import MemoryMeter
from pagestash.saved.keeper import Keeper
from pagestash.sizes import format_bytes
from pagestash.train.data import Corpus, load_corpus
from pagestash.verifying.verify import verify

# Many layers and tokens, few weights: activations are most of the memory, as in large training runs.
SHAPE = DecoderConfig(
    vocab=256,
    width=128,
    layers=12,
    heads=4,
    kv_heads=2,
    qk_norm=True,
    experts=8,
    top_k=2,
    expert_width=64,
    balance_loss=1e-2,
)
SEQUENCES, TOKENS = 2, 512
SPARE = 0.05
"""Part of the budget that is left free: on a CPU predictions are up to 2 % too low (docs/plan.md)."""
Batch = tuple[torch.Tensor, torch.Tensor]


class Run:
    """One training run: the loss and the seconds of each step."""

    def __init__(self, seed: int, policy: Policy | None = None) -> None:
        self.model = Decoder(SHAPE)
        self.model.initialise(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.keeper = None if policy is None else Keeper(policy).attach(self.model)
        self.losses: list[float] = []
        self.times: list[float] = []

    def train(self, batch: Batch) -> None:
        begun = time.perf_counter()
        loss = self._forward_and_backward(batch)
        self.times.append(time.perf_counter() - begun)
        self.losses.append(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def activations(self, batch: Batch) -> int:
        """The most bytes of activations in one more step, which updates nothing."""
        meter = MemoryMeter(torch.device("cpu"))
        with meter:
            meter.mark()
            self._forward_and_backward(batch)
            return meter.mark().peak

    @property
    def seconds(self) -> float:
        """The median step, without the first, which warms up."""
        return statistics.median(self.times[1:] or self.times)

    def _forward_and_backward(self, batch: Batch) -> float:
        with nullcontext() if self.keeper is None else self.keeper.step():
            loss: torch.Tensor = sum(self.model(*batch))
            loss.backward()
        return loss.item()


def run(options: DemoOptions) -> int:
    """The exit code: 1 if anything differs in a single bit."""
    equal: list[bool] = []
    code = exit_code(lambda: equal.append(_checked(options)))
    return code or int(not all(equal))


def _checked(options: DemoOptions) -> bool:
    for name, value, least, most in (
        ("steps", options.steps, 1, 2**31 - 1),
        ("seed", options.seed, 0, 2**63 - 1),
    ):
        if not least <= value <= most:
            raise ValueError(f"--{name} {value}: expected {least} to {most}")
    try:
        return main(options.steps, options.seed, options.out)
    except OSError as error:
        raise ValueError(f"--out {options.out}: {error.strerror}") from error


def main(steps: int, seed: int, out: Path) -> bool:
    """Run the demo, and write what it finds to `out`; False if anything differs in a single bit."""
    threads = torch.get_num_threads()
    # Operations this small gain little from a second thread, and lose much if its core is busy.
    torch.set_num_threads(1)
    try:
        return _run(steps, seed, out)
    finally:
        torch.set_num_threads(threads)


def _run(steps: int, seed: int, out: Path) -> bool:
    console = Console(highlight=False)
    say = partial(console.print, markup=False)
    out.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus([], TOKENS + 1)
    say(
        f"A decoder of {SHAPE.layers} layers with {SHAPE.experts} experts each, {SHAPE.top_k} of them for a token. "
        f"A batch is {SEQUENCES} × {TOKENS} bytes of Python's standard library. All on one core of the CPU."
    )

    pictures = importlib.util.find_spec("matplotlib") is not None
    if not pictures:
        say("Without pictures: they need matplotlib (pip install 'pagestash[plot]').")

    say("\n1. Profile a step")
    plain = Run(seed)
    found = profile(plain.model, _batch(corpus, 0, seed))
    found.save(out / "profile.json")
    state = optimizer_state(plain.optimizer)
    base, needed = base_bytes(found, state), predict(found, Policy()).peak_bytes
    say(
        f"   activations {format_bytes(needed)}, of which {format_bytes(found.total_bytes)} are saved for backward;"
        f" weights, gradients and optimizer {format_bytes(base)}"
    )

    half = int((1 - SPARE) * needed / 2)
    say(f"\n2. Plan for half of the activations, less {100 * SPARE:.0f} % to spare: {format_bytes(half)}")
    # A CPU has no other memory to offload to.
    plan = plan_profile(found, budget=base + half, optimizer_bytes=state, host=0)
    plan.policy.save(out / "policy.toml")
    for row in plan.rows:
        say(f"   {row.home} {row.match}: {format_bytes(row.bytes)}")

    say(f"\n3. Train {steps} steps, without a policy and with the plan")
    runs = plain, Run(seed, plan.policy)
    for step in track(range(1, steps + 1), "   steps", console=console):
        batch = _batch(corpus, step, seed)
        for run in runs:
            run.train(batch)
    say(f"   losses of step {steps}: {runs[0].losses[-1]:.6f} and {runs[1].losses[-1]:.6f}")
    measured = [run.activations(batch) for run in runs]
    # From the trained weights: a step that is measured, and one that uses what was measured.
    report = verify(plain.model, batch, plan.policy, optimizer=plain.optimizer, steps=2)

    say()
    console.print(_table(plan, runs, measured))
    equal = runs[0].losses == runs[1].losses
    say(f"Losses of all {steps} steps are equal to the last bit: {'yes' if equal else 'NO'}.")
    say(f"Two more steps, verified: {report}")
    if pictures:
        activations = _without(base, plan)
        activations.plot_curve(out / "curve.png")
        activations.plot_memory(out / "memory.png")
        say(f"Pictures of the same bytes: {out / 'curve.png'} and {out / 'memory.png'}")
    return equal and report.equal


def _batch(corpus: Corpus, step: int, seed: int) -> Batch:
    window = corpus.windows(step, seed, SEQUENCES, TOKENS + 1, 0, SEQUENCES)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _without(base: int, plan: Plan) -> Plan:
    """The plan without the bytes of weights, gradients and optimizer, which no policy changes."""

    def less(found: Prediction) -> Prediction:
        memory = {**found.memory, "base": [size - base for size in found.memory["base"]]}
        return replace(found, peak_bytes=found.peak_bytes - base, memory=memory)

    return replace(
        plan,
        predicted=less(plan.predicted),
        unplanned=less(plan.unplanned),
        alternatives={name: less(found) for name, found in plan.alternatives.items()},
        curve=[(size - base, seconds) for size, seconds in plan.curve],
        budget_bytes=plan.budget_bytes - base,
    )


def _table(plan: Plan, runs: Sequence[Run], measured: Sequence[int]) -> Table:
    """Activations at the peak and time of a step, predicted and measured, both ways."""
    table = Table()
    for heading in (
        "",
        "memory\npredicted",
        "memory\nmeasured",
        "time\npredicted",
        "time\nmeasured",
        "last loss",
    ):
        table.add_column(heading, justify="right" if heading else "left")
    rows: list[tuple[float, float, float, float]] = []
    for name, told, size, run in zip(
        ("without a policy", "planned"), (plan.unplanned, plan.predicted), measured, runs
    ):
        rows.append((told.peak_bytes - told.memory["base"][0], size, told.seconds, run.seconds))
        sizes = (format_bytes(int(own)) for own in rows[-1][:2])
        times = (f"{1e3 * own:.0f} ms" for own in rows[-1][2:])
        table.add_row(name, *sizes, *times, f"{run.losses[-1]:.6f}")
    table.add_section()
    table.add_row("planned / without", *(f"{after / before:.2f}" for before, after in zip(*rows)), "")
    return table
