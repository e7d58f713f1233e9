"""Forward and backward of a slice of Qwen3-30B-A3B in transformers, as its users have it and with `pagestash.hf`.

    python -m benchmarks.hf_step

All ways run in one process, one after the other, from the same weights and tokens. Time is forward and backward
without an optimizer; memory is the peak above weights and gradients. Ours are what `optimize` gives, in the order
in which its parts are switched on, and then the policy file of `examples/`. Liger runs where it is installed.
Rows of gpt-oss-20b have flex attention, and one has `eager`, which transformers takes where nothing is said.
"""

import argparse
import gc
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import pagestash as ps
import pagestash.hf
from benchmarks.harness import Claim, write
from pagestash.kernels.gemm.products import described

GIB = 1 << 30
POLICY = Path(__file__).parents[1] / "examples" / "huggingface.toml"
PLAIN, CHECKPOINTED = "transformers, grouped_mm", "the same, gradient checkpointing"
EAGER_ATTENTION = f"{PLAIN}, eager attention"
GPT_OSS = "gpt-oss-20b"
LIGER, LIGER_CHECKPOINTED = "Liger, all of it", "Liger, gradient checkpointing"
EXPERTS, NORM, ALL, POLICED = (
    "our experts and fused head",
    "and RMSNorm",
    "and RoPE: optimize(model)",
    "optimize(model), huggingface.toml",
)
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
GRAPHED = {False: "eager", True: "GraphedStep"}
UNDER = {False: "optimize(model)", True: POLICED}


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Layers of Qwen3-30B-A3B, with a smaller vocabulary."""

    layers: int = 8
    sequences: int = 2
    sequence: int = 4096
    vocabulary: int = 32768
    width: int = 2048
    inner: int = 768
    experts: int = 128
    top_k: int = 8
    heads: int = 32
    key_heads: int = 4
    head_width: int = 128
    attention: str = "sdpa"

    def config(self) -> transformers.PreTrainedConfig:
        return transformers.Qwen3MoeConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            moe_intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.head_width,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            norm_topk_prob=True,
            use_cache=False,
        )

    def tokens(self, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        shape = (self.sequences, self.sequence)
        return torch.randint(0, self.vocabulary, shape, generator=generator).to(device)


@dataclass(frozen=True, kw_only=True)
class GptOssSlice(Slice):
    """Layers of gpt-oss-20b, with a smaller vocabulary. Its attention has sinks, for which flex has a kernel."""

    layers: int = 4
    sequence: int = 2048
    width: int = 2880
    inner: int = 2880
    experts: int = 32
    top_k: int = 4
    heads: int = 64
    key_heads: int = 8
    head_width: int = 64
    attention: str = "flex_attention"

    def config(self) -> transformers.PreTrainedConfig:
        return transformers.GptOssConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.head_width,
            num_local_experts=self.experts,
            num_experts_per_tok=self.top_k,
            use_cache=False,
        )


QUICK = Slice(layers=2, sequence=1024)


def build(shape: Slice, device: torch.device, dtype: torch.dtype, experts: str) -> Any:
    """The same weights each time."""
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            shape.config(), dtype=dtype, experts_implementation=experts, attn_implementation=shape.attention
        )
    return model.train()


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def optimized(model: Any, policy: ps.Policy | None = None, **parts: bool) -> tuple[Any, Any]:
    """The model after `optimize`, and its keeper."""
    pagestash.hf.optimize(model, **parts)
    return model, None if policy is None else ps.Keeper(policy).attach(model)


def ways(shape: Slice, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Each way's model, and its keeper or None, made when it is called."""
    make = partial(build, shape, device, dtype)
    return {
        PLAIN: lambda: (make("grouped_mm"), None),
        CHECKPOINTED: lambda: (checkpointed(make("grouped_mm")), None),
        EXPERTS: lambda: optimized(make("pagestash"), norm=False, rope=False, attention=False),
        NORM: lambda: optimized(make("pagestash"), rope=False, attention=False),
        ALL: lambda: optimized(make("pagestash")),
        POLICED: lambda: optimized(make("pagestash"), ps.Policy.load(POLICY)),
    }


def step(model: Any, keeper: Any, tokens: torch.Tensor) -> torch.Tensor:
    if keeper is None:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()
    with keeper.step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    return loss.detach()


def measure(model: Any, keeper: Any, tokens: torch.Tensor, *, warm: int, repeats: int) -> dict[str, float]:
    """Milliseconds (the median of the faster of two rounds), GiB above weights and gradients, and the loss."""
    for _ in range(warm):  # gradients are there after the first, and a policy has its plan after the second
        loss = step(model, keeper, tokens)
    if tokens.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    first = timed(lambda: step(model, keeper, tokens), tokens, repeats=repeats)
    peak = torch.cuda.max_memory_allocated() - held_bytes(model) if tokens.is_cuda else 0

    def fresh() -> None:
        model.zero_grad()
        step(model, keeper, tokens)

    fresh_ms = statistics.median(timed(fresh, tokens, warm=2, repeats=repeats))
    # Once more, some time later: a slow moment of the host is no property of the way.
    again = timed(lambda: step(model, keeper, tokens), tokens, warm=2, repeats=repeats)
    ms = min(map(statistics.median, (first, again)))
    return {"ms": ms, "gib": peak / GIB, "fresh_ms": fresh_ms, "loss": loss.item()}


def multiplied_by(model: Any, device: torch.device) -> str:
    """Who multiplies rows of experts."""
    if model.config._experts_implementation == "pagestash":
        return described(device, model.dtype)
    liger = any(type(module).__module__.startswith("liger_kernel.") for module in model.modules())
    return "Liger" if liger else "torch (transformers' grouped_mm)"


def held_bytes(model: Any) -> int:
    """Of weights and gradients. (Not what is allocated now: the pool of a policy counts as activations.)"""
    return sum(each.nbytes + (0 if each.grad is None else each.grad.nbytes) for each in model.parameters())


def timed(run: Callable[[], Any], tokens: torch.Tensor, *, repeats: int, warm: int = 0) -> list[float]:
    """Milliseconds of each run."""
    times = []
    for _ in range(warm + repeats):
        if tokens.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if tokens.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return [1000 * each for each in times[warm:]]


def tidy(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compare(
    shape: Slice, device: torch.device, dtype: torch.dtype, *, warm: int = 4, repeats: int = 10
) -> list[dict[str, Any]]:
    """A row for each way."""
    return measured(ways(shape, device, dtype), shape.tokens(device), warm=warm, repeats=repeats)


def compare_liger(
    shape: Slice, device: torch.device, dtype: torch.dtype, *, warm: int = 4, repeats: int = 10
) -> list[dict[str, Any]]:
    """All that Liger has for this model, where it is installed. Its first call tunes its experts: minutes."""
    if importlib.util.find_spec("liger_kernel") is None:
        return []
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    def liger(model: Any) -> tuple[Any, Any]:
        _apply_liger_kernel_to_instance(model=model)
        return model, None

    make = partial(build, shape, device, dtype, "grouped_mm")
    found = {LIGER: lambda: liger(make()), LIGER_CHECKPOINTED: lambda: liger(checkpointed(make()))}
    return measured(found, shape.tokens(device), warm=warm, repeats=repeats)


def compare_gpt_oss(
    shape: GptOssSlice, device: torch.device, dtype: torch.dtype, *, warm: int = 4, repeats: int = 10
) -> list[dict[str, Any]]:
    """A row for each way, and one for plain transformers with the attention that it takes by itself."""
    print("gpt-oss-20b, 4 layers", flush=True)
    found = ways(shape, device, dtype)
    found[EAGER_ATTENTION] = ways(replace(shape, attention="eager"), device, dtype)[PLAIN]
    rows = measured(found, shape.tokens(device), warm=warm, repeats=repeats)
    return [row | {"way": f"{GPT_OSS}: {row['way']}"} for row in rows]


def measured(
    found: dict[str, Callable[[], tuple[Any, Any]]], tokens: torch.Tensor, *, warm: int, repeats: int
) -> list[dict[str, Any]]:
    rows = []
    for name, make in found.items():
        model, keeper = make()
        row: dict[str, Any] = {"way": name, "products": multiplied_by(model, tokens.device)}
        rows.append(row | measure(model, keeper, tokens, warm=warm, repeats=repeats))
        shown = "{way:<40}{ms:8.1f} ms{gib:7.2f} GiB  fresh {fresh_ms:.1f} ms  loss {loss:.5f}  {products}"
        print(shown.format(**rows[-1]), flush=True)
        del model, keeper
        tidy(tokens.device)
    return rows


def compare_graphed(
    shape: Slice, device: torch.device, dtype: torch.dtype, *, repeats: int = 10
) -> list[dict[str, Any]]:
    """A whole step with its optimizer, as a plain loop and in a CUDA graph (on a CPU: eagerly, too)."""
    tokens = shape.tokens(device)
    rows = []
    for kind, policed, graphed in itertools.product(OPTIMIZERS, (False, True), (False, True)):
        policy = ps.Policy.load(POLICY) if policed else ps.Policy()
        run = training(shape, device, dtype, kind, policy, graphed)
        rounds = [timed(lambda run=run: run(tokens), tokens, warm=4, repeats=repeats) for _ in range(2)]  # type: ignore[misc]
        ms, loss = min(map(statistics.median, rounds)), run(tokens).item()
        way = {"way": training_way(kind, policed, graphed), "products": described(device, dtype)}
        rows.append({**way, "ms": ms, "loss": loss})
        print("{way:<55}{ms:8.1f} ms  loss {loss:.5f}".format(**rows[-1]), flush=True)
        del run
        tidy(device)
    return rows


def training_way(kind: str, policed: bool, graphed: bool) -> str:
    return f"{UNDER[policed]}, {kind}, {GRAPHED[graphed]}"


def training(
    shape: Slice, device: torch.device, dtype: torch.dtype, kind: str, policy: ps.Policy, graphed: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """One training step of a new model."""
    model = build(shape, device, dtype, "pagestash")
    pagestash.hf.optimize(model)
    keeper = ps.Keeper(policy).attach(model) if graphed or policy.rules else None
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=1e-5, fused=True)  # type: ignore[call-arg]

    def update(loss: torch.Tensor) -> torch.Tensor:
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def train_step(tokens: torch.Tensor) -> torch.Tensor:
        return update(step(model, None, tokens))

    if graphed:
        assert keeper is not None
        return ps.GraphedStep(train_step, keeper, optimizer=optimizer)  # it opens the keeper's step itself
    return lambda tokens: update(step(model, keeper, tokens))


def graphed_claims(rows: list[dict[str, Any]], where: str) -> list[Claim]:
    by = {row["way"]: row["ms"] for row in rows}
    return [
        Claim(
            what=f"{where}a graphed step over an eager one, {'huggingface.toml and ' * policed}{kind} in both",
            value=by[training_way(kind, policed, True)] / by[training_way(kind, policed, False)],
            bar=0.92,
            better="at most",
        )
        for policed, kind in itertools.product((False, True), OPTIMIZERS)
        if training_way(kind, policed, True) in by
    ]


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """What is claimed of the rows so far."""
    by = {row["way"]: row for row in rows}
    where = "Qwen3-30B-A3B in transformers, 8 layers, 2 × 4,096 tokens: "
    return [
        *step_claims(by, where, "", (77.0, 5.75), (87.0, 2.75)),
        *graphed_claims(rows, where),
        *step_claims(
            by,
            "gpt-oss-20b in transformers with flex attention, 4 layers, 2 × 2,048 tokens: ",
            f"{GPT_OSS}: ",
            (68.0, 3.2),
            (75.0, 2.35),
        ),
    ]


def step_claims(
    by: dict[str, dict[str, Any]],
    where: str,
    prefix: str,
    alone: tuple[float, float],
    policed: tuple[float, float],
) -> Iterator[Claim]:
    """Milliseconds and GiB after `optimize`, alone and under a policy, by the bars of both; none without rows."""
    for way, said, of_peak, bars in (
        (ALL, "optimize(model)", "peak", alone),
        (POLICED, "under a policy", "peak of that", policed),
    ):
        row = by.get(f"{prefix}{way}")
        if row is not None:
            yield Claim(what=f"{where}{said}", value=row["ms"], bar=bars[0], better="at most", unit="ms")
            yield Claim(what=f"{where}{of_peak}", value=row["gib"], bar=bars[1], better="at most", unit="GiB")


def run(out: Path | None = None, quick: bool = False) -> Path:
    shape, device, dtype = QUICK if quick else Slice(), torch.device("cuda"), torch.bfloat16
    repeats = 3 if quick else 10

    parts: list[Callable[[], list[dict[str, Any]]]] = [
        lambda: compare(shape, device, dtype, repeats=repeats),
        lambda: compare_graphed(shape, device, dtype, repeats=repeats),
        *([] if quick else [lambda: compare_gpt_oss(GptOssSlice(), device, dtype, repeats=repeats)]),
        lambda: compare_liger(shape, device, dtype, repeats=repeats),
    ]
    rows: list[dict[str, Any]] = []
    for part in parts:
        rows += part()
        # After each part, because a run of minutes may be cut off.
        claims = [] if quick else claims_of(rows)
        path = write("hf_step", config=asdict(shape), rows=rows, claims=claims, out=out)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    print(run(chosen.out, chosen.quick))
