"""Forward and backward of a slice of Qwen3-30B-A3B in transformers, as its users have it and with `pagestash.hf`.

    python -m benchmarks.hf_step

All ways run in one process, one after the other, from the same weights and tokens. Time is forward and backward
without an optimizer; memory is the peak above weights and gradients. Ours are what `optimize` gives, in the order
in which its parts are switched on, and then the policy file of `examples/`. Liger runs where it is installed.
"""

import argparse
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import pagestash as ps
import pagestash.hf
from benchmarks.harness import Claim, write

GIB = 1 << 30
POLICY = Path(__file__).parents[1] / "examples" / "huggingface.toml"
PLAIN, CHECKPOINTED = "transformers, grouped_mm", "the same, gradient checkpointing"
LIGER, LIGER_CHECKPOINTED = "Liger, all of it", "Liger, gradient checkpointing"
EXPERTS, NORM, ALL, POLICED = (
    "our experts and fused head",
    "and RMSNorm",
    "and RoPE: optimize(model)",
    "optimize(model), huggingface.toml",
)
LORA_PLAIN, LORA_CHECKPOINTED = "LoRA: PEFT, grouped_mm", "LoRA: PEFT, gradient checkpointing"
LORA, LORA_POLICED = "LoRA: PEFT, optimize(model)", "LoRA: optimize(model), huggingface.toml"
EAGER_STEP, GRAPHED_STEP = "optimize(model), AdamW, eager", "optimize(model), AdamW, GraphedStep"


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

    def config(self) -> transformers.Qwen3MoeConfig:
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


QUICK = Slice(layers=2, sequence=1024)


def build(shape: Slice, device: torch.device, dtype: torch.dtype, experts: str) -> Any:
    """The same weights each time."""
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            shape.config(), dtype=dtype, experts_implementation=experts, attn_implementation="sdpa"
        )
    return model.train()


def ways(shape: Slice, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Each way's model, and its keeper or None, made when it is called."""

    def theirs(checkpointed: bool) -> tuple[Any, Any]:
        model = build(shape, device, dtype, "grouped_mm")
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model, None

    def liger(checkpointed: bool) -> tuple[Any, Any]:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        model, _ = theirs(checkpointed)
        _apply_liger_kernel_to_instance(model=model)
        return model, None

    def ours(policy: ps.Policy | None = None, **parts: bool) -> tuple[Any, Any]:
        model = build(shape, device, dtype, "pagestash")
        pagestash.hf.optimize(model, **parts)
        return model, None if policy is None else ps.Keeper(policy).attach(model)

    found = {
        PLAIN: lambda: theirs(False),
        CHECKPOINTED: lambda: theirs(True),
        EXPERTS: lambda: ours(norm=False, rope=False, attention=False),
        NORM: lambda: ours(rope=False, attention=False),
        ALL: ours,
        POLICED: lambda: ours(ps.Policy.load(POLICY)),
    }
    # Last: its experts are tuned at the first call, which takes minutes.
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        found |= {LIGER: lambda: liger(False), LIGER_CHECKPOINTED: lambda: liger(True)}
    return found


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
    """Milliseconds (the median), GiB above weights and gradients, and the loss."""
    cuda = tokens.is_cuda
    for _ in range(warm):  # gradients are there after the first, and a policy has its plan after the second
        loss = step(model, keeper, tokens)
    # Not what is allocated now: the pool of a policy counts as activations.
    held = sum(each.nbytes + (0 if each.grad is None else each.grad.nbytes) for each in model.parameters())
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        loss = step(model, keeper, tokens)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() - held if cuda else 0
    return {"ms": 1000 * statistics.median(times), "gib": peak / GIB, "loss": loss.item()}


def compare(
    shape: Slice, device: torch.device, dtype: torch.dtype, *, warm: int = 4, repeats: int = 10
) -> list[dict[str, Any]]:
    """A row for each way."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, shape.vocabulary, (shape.sequences, shape.sequence), generator=generator)
    tokens = tokens.to(device)
    rows = []
    for name, make in ways(shape, device, dtype).items():
        model, keeper = make()
        rows.append({"way": name} | measure(model, keeper, tokens, warm=warm, repeats=repeats))
        print("{way:<36}{ms:8.1f} ms{gib:7.2f} GiB  loss {loss:.5f}".format(**rows[-1]), flush=True)
        del model, keeper
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def compare_lora(
    shape: Slice, device: torch.device, dtype: torch.dtype, *, warm: int = 4, repeats: int = 10
) -> list[dict[str, Any]]:
    """LoRA of rank 16 on attention and experts, by PEFT: a row for each way; none where it is not installed."""
    if importlib.util.find_spec("peft") is None:
        return []
    import peft

    def adapted(experts: str) -> Any:
        model = build(shape, device, dtype, experts)
        config = peft.LoraConfig(
            r=16,
            lora_alpha=32,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        model = peft.get_peft_model(model, config).train()
        torch.manual_seed(2)
        with torch.no_grad():  # B starts as zeros, and would hide its half
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.01)
        return model

    def theirs(checkpointed: bool) -> tuple[Any, Any]:
        model = adapted("grouped_mm")
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model, None

    def ours(policy: ps.Policy | None = None) -> tuple[Any, Any]:
        model = adapted("pagestash")
        pagestash.hf.optimize(model)
        return model, None if policy is None else ps.Keeper(policy).attach(model)

    found: dict[str, Callable[[], tuple[Any, Any]]] = {
        LORA_PLAIN: lambda: theirs(False),
        LORA_CHECKPOINTED: lambda: theirs(True),
        LORA: ours,
        LORA_POLICED: lambda: ours(ps.Policy.load(POLICY)),
    }
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, shape.vocabulary, (shape.sequences, shape.sequence), generator=generator)
    tokens = tokens.to(device)
    rows = []
    for name, make in found.items():
        model, keeper = make()
        rows.append({"way": name} | measure(model, keeper, tokens, warm=warm, repeats=repeats))
        print("{way:<40}{ms:8.1f} ms{gib:7.2f} GiB  loss {loss:.5f}".format(**rows[-1]), flush=True)
        del model, keeper
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def lora_claims(rows: list[dict[str, Any]], where: str) -> list[Claim]:
    by = {row["way"]: row for row in rows}
    if LORA not in by:
        return []
    ours, theirs = by[LORA], by[LORA_PLAIN]
    what = f"{where}LoRA on attention and experts, over PEFT's own"
    return [
        Claim(what=f"{what}: time", value=ours["ms"] / theirs["ms"], bar=0.6, better="at most"),
        Claim(what=f"{what}: peak", value=ours["gib"] / theirs["gib"], bar=0.35, better="at most"),
    ]


def compare_graphed(
    shape: Slice, device: torch.device, dtype: torch.dtype, *, repeats: int = 10
) -> list[dict[str, Any]]:
    """A whole step with its optimizer, eagerly and in a CUDA graph (on a CPU: eagerly, too)."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, shape.vocabulary, (shape.sequences, shape.sequence), generator=generator)
    tokens = tokens.to(device)
    rows = []
    for name, graph in ((EAGER_STEP, False), (GRAPHED_STEP, None)):
        model = build(shape, device, dtype, "pagestash")
        pagestash.hf.optimize(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def train_step(tokens: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        keeper = ps.Keeper(ps.Policy()).attach(model)
        whole = ps.GraphedStep(train_step, keeper, optimizer=optimizer, graph=graph)
        times = []
        for _ in range(4 + repeats):
            begin = time.perf_counter()
            loss = whole(tokens)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        whole.wait()
        rows.append({"way": name, "ms": 1000 * statistics.median(times[4:]), "loss": loss.item()})
        print("{way:<36}{ms:8.1f} ms  loss {loss:.5f}".format(**rows[-1]), flush=True)
        del model, optimizer, keeper, whole, train_step
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def run(out: Path | None = None, quick: bool = False) -> Path:
    shape = QUICK if quick else Slice()
    repeats = 3 if quick else 10
    rows = compare(shape, torch.device("cuda"), torch.bfloat16, repeats=repeats)
    rows += compare_graphed(shape, torch.device("cuda"), torch.bfloat16, repeats=repeats)
    rows += compare_lora(shape, torch.device("cuda"), torch.bfloat16, repeats=repeats)
    by = {row["way"]: row for row in rows}
    graphed = by[GRAPHED_STEP]["ms"] / by[EAGER_STEP]["ms"]
    where = "Qwen3-30B-A3B in transformers, 8 layers, 2 × 4,096 tokens: "
    claims = [
        Claim(what=f"{where}optimize(model)", value=by[ALL]["ms"], bar=88.0, better="at most", unit="ms"),
        Claim(what=f"{where}peak", value=by[ALL]["gib"], bar=5.8, better="at most", unit="GiB"),
        Claim(what=f"{where}under a policy", value=by[POLICED]["ms"], bar=100.0, better="at most", unit="ms"),
        Claim(what=f"{where}peak of that", value=by[POLICED]["gib"], bar=2.9, better="at most", unit="GiB"),
        Claim(what=f"{where}a graphed step over an eager one", value=graphed, bar=0.92, better="at most"),
        *lora_claims(rows, where),
    ]
    return write("hf_step", config=asdict(shape), rows=rows, claims=[] if quick else claims, out=out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    print(run(chosen.out, chosen.quick))
