"""What `bits=8` costs in accuracy, and what it saves: loss curves beside bf16's, held bytes, and kernels' speed.

    python -m benchmarks eight_bits

Each model is trained from the same weights on the same text, in bf16 under autocast with weights in float32, once
without a policy and once for each policy. One training says little: `shaken`, which is bf16 with each weight first
changed by less than its rounding, ends up to 1.5 % away from the same seed unshaken. So curves are compared by
their means over several seeds and 40 steps at a time, and to the mean of all trainings in bf16, shaken ones
included. The first seed runs alone, for time and memory, the others side by side. On a CPU only the tiny preset is
trained; its times mean nothing.

Where rows are `received`, they come through a dispatch that ends where it starts; three quarters are expected.
"""

import gc
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import pagestash as ps
from benchmarks.harness import Claim, write
from pagestash.kernels.backend import choose
from pagestash.kernels.moe.route import route
from pagestash.kernels.pages.eight_bits import CodeShape, decode, encode
from pagestash.models.config import preset
from pagestash.models.decoder import Decoder
from pagestash.moe import MoEConfig, Received
from pagestash.train.config import TrainConfig
from pagestash.train.data import Corpus, load_corpus
from pagestash.train.loop import learning_rate
from pagestash.train.state import make_optimizer

WINDOW, PROGRESS = 40, 20
BAR = 0.005


@dataclass(frozen=True)
class Training:
    """A model, and how it is trained."""

    name: str
    preset: str
    layers: int | None
    batch: int
    sequence: int
    steps: int
    seeds: int = 1
    at_once: int = 1
    """Seeds that train side by side; each takes its share of the device's memory."""
    config: TrainConfig = field(default_factory=TrainConfig)


# Such tokens, rates and seeds that half a percent is told from the spread of training itself.
TINY = Training("tiny", "tiny", None, 32, 256, 200, 6, 5, TrainConfig(lr=1e-3, min_lr=1e-4))
QWEN3 = Training(
    name="4 layers of qwen3-30b-a3b",
    preset="qwen3-30b-a3b",
    layers=4,
    batch=4,
    sequence=1024,
    steps=120,
    seeds=5,
    at_once=2,  # 50 GiB each
    config=TrainConfig(lr=1e-4, min_lr=1e-5, warmup=20),
)
BITS: Any = {"bits": 8, "min_bytes": 4096}
RECEIVED = "8 bits, experts, received rows"
POLICIES: dict[str, list[ps.Rule]] = {
    "8 bits, all layers": [ps.Rule("layers.*", "keep", **BITS)],
    "8 bits, experts": [ps.Rule("layers.*.moe.experts", "stash", **BITS)],
    RECEIVED: [ps.Rule("layers.*.moe.experts", "stash", **BITS)],
}
PLAIN, SHAKEN = "bf16", "shaken"
WAYS: dict[str, list[ps.Rule] | None] = {PLAIN: None, SHAKEN: None, **POLICIES}


class Loop:
    """A dispatch whose wire ends where it starts, with room for half as many rows again."""

    capacity = None

    def __init__(self, config: MoEConfig) -> None:
        self.experts = config.experts

    def send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, over: torch.Tensor | None
    ) -> Received:
        rows = ids.numel()
        routing = route(ids, self.experts, capacity=rows * 3 // 2, over=over)
        return Received(x, weights, ids, routing, rows * 3 // 4)

    def collect(self, slots: torch.Tensor, received: Received) -> torch.Tensor:
        return slots

    def grow_capacity(self, *, headroom: float, alignment: int) -> bool:
        return False


def train(how: Training, way: str, seed: int, device: torch.device) -> dict[str, Any]:
    """Losses of all steps; on a GPU also time and memory."""
    print(f"{how.name}, seed {seed}: {way}", flush=True)
    config = preset(how.preset, layers=how.layers, vocab=256)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model = Decoder(config, make_dispatch=Loop if way == RECEIVED else None, device=device)
    model.initialise(seed)
    if way == SHAKEN:
        _shake(model)
    optimizer = make_optimizer([model], how.config)
    keeper = ps.Keeper(ps.Policy(WAYS[way] or [])).attach(model)
    corpus = load_corpus((), how.sequence + 1)
    losses: list[torch.Tensor] = []
    held: list[int] = []
    times: list[float] = []
    since = time.perf_counter()
    for number, tokens in enumerate(_batches(corpus, how, seed, device), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, how.config)
        before = _allocated(device)
        with keeper.step():
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                loss, aux = model(tokens[:, :-1], tokens[:, 1:])
            held.append(_allocated(device) - before)
            (loss + aux).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), how.config.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if number % PROGRESS == 0:
            mean = torch.stack(losses[-PROGRESS:]).mean().item()  # waits for the device
            times.append((time.perf_counter() - since) / PROGRESS)
            since = time.perf_counter()
            print(f"  step {number:4d}: loss {mean:.4f}, {times[-1] * 1e3:.1f} ms a step", flush=True)
    pool = 0 if keeper.pool is None else keeper.pool.device_pages * keeper.pool.page_bytes
    stats = keeper.stats()
    return {
        "losses": torch.stack(losses).tolist(),
        "step_ms": statistics.median(times) * 1e3,
        # At the end of forward. Pages were allocated before it.
        "held_bytes": int(statistics.median(held)) + pool,
        "homes": {name: home.peak for name, home in stats.homes.items()},
    }


def _batches(corpus: Corpus, how: Training, seed: int, device: torch.device) -> Iterator[torch.Tensor]:
    for step in range(1, how.steps + 1):
        yield corpus.windows(step, seed, how.batch, how.sequence + 1, 0, how.batch).to(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


@torch.no_grad()
def _shake(model: torch.nn.Module) -> None:
    """Change each weight by less than half a unit in bf16's last place: 2^-9 of it."""
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.mul_(1 + 2.0**-9 * (2 * torch.rand_like(weight) - 1))


def windows(losses: list[float]) -> list[float]:
    """Mean losses, `WINDOW` steps at a time."""
    return [statistics.mean(losses[at : at + WINDOW]) for at in range(0, len(losses) - WINDOW + 1, WINDOW)]


def compare(losses: list[float], plain: list[float]) -> tuple[float, float]:
    """The largest difference of two curves, and that of the last quarter's mean, both over the plain one."""
    pairs = list(zip(windows(losses), windows(plain)))
    quarter = len(plain) // 4
    ends = statistics.mean(losses[-quarter:]), statistics.mean(plain[-quarter:])
    return max(abs(a - b) / b for a, b in pairs), (ends[0] - ends[1]) / ends[1]


def curves(how: Training, device: torch.device) -> list[dict[str, Any]]:
    """One row for each way to train."""
    found = {way: [train(how, way, 0, device)] for way in WAYS}
    if how.seeds > 1:
        at_once = how.at_once if device.type == "cuda" else 1
        with ProcessPoolExecutor(at_once, mp_context=get_context("spawn")) as pool:
            others = {
                way: [pool.submit(train, how, way, seed, device) for seed in range(1, how.seeds)]
                for way in WAYS
            }
            for way, runs in others.items():
                found[way] += [run.result() for run in runs]
    plain = _mean([run["losses"] for way in (PLAIN, SHAKEN) for run in found[way]])
    rows = []
    for way, runs in found.items():
        by_seed = [run["losses"] for run in runs]
        losses = _mean(by_seed)
        # (`shaken` has nobody but the unshaken to be compared to.)
        largest, at_end = compare(losses, rows[0]["losses"] if way == SHAKEN else plain)
        row = {"model": how.name, "way": way, **runs[0], "losses": losses, "windows": windows(losses)}
        row |= {"largest": largest, "at_end": at_end, "windows_by_seed": [*map(windows, by_seed)]}
        rows.append(row)
        print(f"{how.name}, {way}: off by {largest:.4%} at most, {at_end:+.4%} at the end", flush=True)
    return rows


def _mean(curves: list[list[float]]) -> list[float]:
    return [statistics.mean(step) for step in zip(*curves, strict=True)]


def kernels(device: torch.device) -> list[dict[str, Any]]:
    """Time of coding and decoding bf16 values, over that of copying them."""
    rows = []
    for mebibytes in (16, 64, 256, 1024):
        rows.append(row := _speed(device, mebibytes))
        times = ", ".join(f"{way} {row[f'{way}_ms']:.3f} ms" for way in ("copy", "encode", "decode"))
        print(f"{mebibytes} MiB: {times}", flush=True)
    return rows


def _speed(device: torch.device, mebibytes: int) -> dict[str, Any]:
    backend = choose(device)
    values = torch.randn(mebibytes << 19, device=device, dtype=torch.bfloat16)
    shape = CodeShape.of(values.numel())
    codes = torch.empty(shape.rows, shape.row_bytes, device=device, dtype=torch.uint8)
    out = torch.empty_like(values)
    copy = _milliseconds(lambda: out.copy_(values))
    row = {"mebibytes": mebibytes, "copy_ms": copy}
    row["encode_ms"] = _milliseconds(lambda: encode(values, shape, codes, backend))
    row["decode_ms"] = _milliseconds(lambda: decode(codes, shape, out, backend))
    moved = 2 + shape.bytes / values.numel()  # bytes a value; a copy moves 4
    for way in ("encode", "decode"):
        row[f"{way}_rate"] = copy / row[f"{way}_ms"] * moved / 4
    return row


def _milliseconds(work: Any, repeats: int = 20) -> float:
    for _ in range(3):
        work()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def claims(rows: list[dict[str, Any]], speeds: list[dict[str, Any]]) -> list[Claim]:
    found = []
    for row in rows:
        if row["way"] in POLICIES:
            what = f"eight bits, {row['model']}, {row['way']}: largest difference of the loss from bf16's"
            found.append(Claim(what=what, value=round(row["largest"], 5), bar=BAR, better="at most"))
    for row in speeds:
        if row["mebibytes"] == 256:
            for way in ("encode", "decode"):
                what = f"eight bits, {way} 256 MiB of bf16: bytes a second over those of copy_"
                found.append(
                    Claim(what=what, value=round(row[f"{way}_rate"], 3), bar=0.85, better="at least")
                )
    return found


def run(out: Path | None = None, quick: bool = False) -> Path:
    """Train, compare, and write the result."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiny = Training("tiny", "tiny", None, 2, 32, WINDOW) if quick else TINY
    rows = curves(tiny, device)
    speeds: list[dict[str, Any]] = []
    if device.type == "cuda":
        speeds = kernels(device)
        if not quick:
            rows += curves(QWEN3, device)
    config = {
        "window": WINDOW,
        "tokens": {how.name: [how.batch, how.sequence] for how in (tiny, QWEN3)},
        "seeds": {how.name: how.seeds for how in (tiny, QWEN3)},
    }
    return write("eight_bits", config=config, rows=[*rows, *speeds], claims=claims(rows, speeds), out=out)
