"""Plans: what is predicted against what is measured, and planned policies against those that one writes by hand.

For each preset a step (forward and backward) is profiled once and planned for parts of its saved bytes. Then it
runs under each plan, and under each policy by hand. Time is the median of steady steps; the peak is the
allocator's, less what was allocated before the model. Without a GPU, or quick, a tiny preset runs, and a CPU's
memory is counted by live storages.
"""

import gc
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import pagestash as ps
from benchmarks.harness import Claim, write
from pagestash.models import Decoder, preset
from pagestash.planning import NothingFits, plan_profile
from pagestash.profiling.memory import MemoryMeter

PARTS = (0.75, 0.5, 0.35)
WARM, REPEATS = 3, 7


@dataclass(frozen=True, kw_only=True)
class Case:
    preset: str
    layers: int
    batch: int
    sequence: int


CASES = (
    Case(preset="qwen3-30b-a3b", layers=8, batch=2, sequence=4096),
    Case(preset="deepseek-v3", layers=4, batch=1, sequence=4096),
    Case(preset="gpt-oss-20b", layers=4, batch=2, sequence=4096),
)
QUICK = (Case(preset="tiny", layers=2, batch=4, sequence=128),)

NORMS = [ps.Rule(f"layers.*.{name}", "recompute") for name in ("attn_norm", "mlp_norm")]
CORE = ("layers.*.attn.core_attn", "layers.*.attn.attn_proj")


def by_hand(profile: ps.Profile) -> dict[str, ps.Policy]:
    """Policies that one would write without a plan."""
    whole = ps.Policy([ps.Rule(match, "offload", min_bytes=1024) for match in CORE])
    fraction = profile.fits(whole).fraction
    hides = [ps.Rule(match, "offload", min_bytes=1024, fraction=fraction) for match in CORE]
    found = {
        "recompute norms": ps.Policy(NORMS),
        "recompute layers": ps.Policy([ps.Rule("layers.*", "recompute")]),
    }
    return found | ({"offload as far as it hides": ps.Policy(hides)} if fraction else {})


class Bench:
    """One model on one device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.device = device
        self.before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        config = preset(case.preset, case.layers)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = Decoder(config, device=device, dtype=dtype)
        self.model.initialise(0)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, config.vocab, (case.batch, case.sequence + 1), generator=generator).to(
            device
        )
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def measure(self, policy: ps.Policy, repeats: int) -> dict[str, Any]:
        """Milliseconds, peak bytes and the loss of steady steps under a policy."""
        keeper = ps.Keeper(policy).attach(self.model) if policy.rules else None
        times, loss = [], torch.zeros(())
        peak = 0
        for number in range(WARM + repeats):
            self.model.zero_grad(set_to_none=True)
            meter = MemoryMeter(self.device)
            self._wait()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            begun = time.perf_counter()
            # Counting storages takes time, which no timed step has.
            counts = self.device.type == "cpu" and number == WARM - 1
            if counts:
                with meter:
                    meter.mark()
                    loss = self._step(keeper)
                    peak = meter.mark().peak + sum(t.nbytes for t in self._weights())
            else:
                loss = self._step(keeper)
            self._wait()
            if number >= WARM:
                times.append(time.perf_counter() - begun)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - self.before
        if keeper is not None:
            keeper.detach()
        self.model.zero_grad(set_to_none=True)
        return {"seconds": statistics.median(times), "peak_bytes": peak, "loss": loss.item()}

    def _step(self, keeper: ps.Keeper | None) -> torch.Tensor:
        if keeper is None:
            loss = sum(self.model(*self.batch))
            loss.backward()
        else:
            with keeper.step():
                loss = sum(self.model(*self.batch))
                loss.backward()
        return loss.detach()

    def _weights(self):
        return (*self.model.parameters(), *self.model.buffers())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def compare(case: Case, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """One row for each plan and each policy by hand."""
    bench = Bench(case, device)
    found = ps.profile(bench.model, bench.batch)
    name = f"{case.preset}, {case.layers} layers"
    plain = bench.measure(ps.Policy(), repeats)
    rows = [{"case": name, "way": "keep", "part": 1.0, **plain}]
    for way, policy in by_hand(found).items():
        rows.append({"case": name, "way": way, "part": None, **bench.measure(policy, repeats)})
    for part in PARTS:
        row: dict[str, Any] = {"case": name, "way": "plan", "part": part}
        try:
            plan = plan_profile(found, budget=part)
        except NothingFits as error:
            rows.append(row | {"refused": str(error)})
            continue
        row |= {
            "budget_bytes": plan.budget_bytes,
            "predicted_seconds": plan.predicted.seconds,
            "predicted_peak_bytes": plan.predicted.peak_bytes,
            "rules": [f"{rule.match} {rule.home}" for rule in plan.policy.rules],
        }
        rows.append(row | bench.measure(plan.policy, repeats))
    del bench
    gc.collect()
    return rows


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """What a plan promises, over all cases."""
    planned = [row for row in rows if "predicted_seconds" in row]
    claims = []
    if planned:
        peaks = [row["predicted_peak_bytes"] / row["peak_bytes"] for row in planned]
        times = [row["predicted_seconds"] / row["seconds"] for row in planned]
        kept = [row["peak_bytes"] / row["budget_bytes"] for row in planned]
        for what, value, bar in (
            ("plan: predicted peak, furthest from the measured one", max(abs(p - 1) for p in peaks), 0.03),
            ("plan: predicted peak, furthest below the measured one", max(1 - min(peaks), 0.0), 0.01),
            (
                "plan: predicted step time, furthest from the measured one",
                max(abs(t - 1) for t in times),
                0.05,
            ),
            ("plan: measured peak over the budget", max(kept), 1.0),
        ):
            claims.append(Claim(what=what, value=value, bar=bar, better="at most"))
    for row in planned:
        hand = [
            other["seconds"]
            for other in rows
            if other["case"] == row["case"]
            and other["way"] != "plan"
            and other["peak_bytes"] <= row["budget_bytes"]
        ]
        what = f"plan for {row['part']:g} of the bytes over the best by hand that fits, {row['case']}"
        if hand:
            claims.append(Claim(what=what, value=row["seconds"] / min(hand), bar=1.0, better="at most"))
    for row in planned:
        if row["case"].startswith("qwen3") and row["part"] == 0.5:
            keep = next(o["seconds"] for o in rows if o["case"] == row["case"] and o["way"] == "keep")
            what = f"plan for half of the bytes over keep, {row['case']}"
            claims.append(Claim(what=what, value=row["seconds"] / keep, bar=1.06, better="at most"))
    return claims


def run(out: Path | None = None, quick: bool = False) -> Path:
    cuda = torch.cuda.is_available()
    cases = CASES if cuda and not quick else QUICK
    device = torch.device("cuda" if cuda else "cpu")
    rows = [row for case in cases for row in compare(case, device, 1 if quick else REPEATS)]
    config = {"parts": PARTS, "warm": WARM, "repeats": 1 if quick else REPEATS, "quick": quick}
    return write("plan", config=config, rows=rows, claims=claims_of(rows), out=out)
