"""Published steps: what was told, and the run that is simulated of it.

`FITTED` has the row of each GPU that the constant of its cluster file is fitted to. No constant is fitted to any
other. `EARLIER` were compared while the rules were written, `SEEN` were held out and predicted by a reader of the
project, and `HELD_OUT` were committed here before anybody predicted them: those of two published tables that
this package has a cluster and a model for, and further runs of the same sources.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from benchmarks import published
from benchmarks.published import DEEPSEEK_V3, FULL_ITERATION, HYBRIDEP, QWEN3_30B, QWEN3_235B, run
from pagestash.models.config import DecoderConfig
from pagestash.simulation.model.run import Run

INTERLEAVED = "Interleaved1F1B"
TE_GRAPHS: dict[str, Any] = {"dispatcher": "flex", "graphs": ("attn", "router")}
"""HybridEP or DeepEP, and Transformer Engine's graphs of `attn`, `moe_router` and `moe_preprocess`."""
OVERLAP: dict[str, Any] = {"overlaps_dispatch": True, "delays_weight_gradients": True}
GPT_OSS_120B = DecoderConfig(
    vocab=201_088,
    width=2880,
    layers=36,
    heads=64,
    kv_heads=8,
    head_dim=64,
    attention_bias=True,
    experts=128,
    top_k=4,
    expert_width=2880,
    expert_bias=True,
    activation="clamped",
    window=128,
    full_every=2,
)
MIXTRAL_8X22B = DecoderConfig(
    vocab=32_768,
    width=6144,
    layers=56,
    heads=48,
    kv_heads=8,
    head_dim=128,
    experts=8,
    top_k=2,
    expert_width=16_384,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A published step."""

    what: str
    source: str
    told: float
    unit: Literal["tokens/s", "TFLOPS", "s"]
    """Tokens a second of one GPU, its model operations, or seconds of a step."""
    run: Callable[[], Run]
    cause: str = ""
    """Of a miss."""


BRIDGE = "Megatron-Bridge, docs/performance-summary.md"
ZOO = "yanring/Megatron-MoE-ModelZoo e865051"
REPORT = "arXiv 2603.07685"
LONG_CONTEXT = "attention's efficiency is that of 4,096 tokens, and ring exchanges are not hidden"
SINKS = "heads of 64 dimensions, sinks and biases: kernels are slower than those that were measured"


def counting_ends(layers: int, stages: int) -> list[int]:
    """Layers of each stage where the embedding and the loss count as one each (Qwen3-235B's recipes)."""
    each = (layers + 2) // stages
    return [each - 1, *[each] * (stages - 2), each - 1]


def qwen_235b(cluster: str, global_batch: int, *, pp: int, vpp: int = 1, **values: Any) -> Run:
    layout = {name: values.pop(name) for name in ("tp", "cp", "ep", "zero") if name in values}
    layout |= {"pp": pp, "vpp": vpp, "schedule": "1F1B" if vpp == 1 else INTERLEAVED}
    if pp > 1:
        values["placement"] = counting_ends(QWEN3_235B.layers, pp * vpp)
    return run(QWEN3_235B, cluster, layout, global_batch=global_batch, **values)


def deepseek_v3(cluster: str, global_batch: int, **values: Any) -> Run:
    """With its layer of multi-token prediction."""
    layout = {name: values.pop(name) for name in ("tp", "ep", "pp", "vpp")}
    layout["schedule"] = INTERLEAVED
    stages = layout["pp"] * layout["vpp"]
    values["placement"] = published.SIXTEEN_STAGES if stages == 16 else published.THIRTY_TWO_STAGES
    return run(replace(DEEPSEEK_V3, mtp_layers=1), cluster, layout, global_batch=global_batch, **values)


def gpt_oss(cluster: str, *, pp: int = 1, **values: Any) -> Run:
    return run(GPT_OSS_120B, cluster, {"pp": pp, "ep": values.pop("ep")}, global_batch=1280, **values)


FITTED = {
    "h100": Timed(
        what="Qwen3-30B-A3B on 16 H100, HybridEP, overlap",
        source=BRIDGE,
        told=20.147,
        unit="s",
        run=partial(published.bridge_qwen3, **HYBRIDEP, overlaps_dispatch=True),
    ),
    "gb200": Timed(
        what="DeepSeek-V3 on 256 GB200, MXFP8, full-iteration graphs",
        source=f"{BRIDGE}, 26.08",
        told=4912,
        unit="tokens/s",
        run=partial(published.report_v3, ("mla_up_proj",), precision="mxfp8", **FULL_ITERATION),
    ),
}
"""By cluster."""

EARLIER = (
    Timed(
        what="Qwen3-30B-A3B on 8 GB200, full-iteration graphs",
        source=f"{BRIDGE}, 26.08",
        told=39936,
        unit="tokens/s",
        run=partial(
            run,
            QWEN3_30B,
            "gb200:8",
            {"ep": 8},
            global_batch=512,
            microbatch=4,
            precision="mxfp8",
            **FULL_ITERATION,
        ),
    ),
    Timed(
        what="Qwen3-235B on 256 GB200, full-iteration graphs",
        source=f"{BRIDGE}, 26.08",
        told=7280,
        unit="tokens/s",
        run=partial(qwen_235b, "gb200:256", 8192, pp=8, vpp=3, ep=32, precision="mxfp8", **FULL_ITERATION),
    ),
    Timed(
        what="Qwen3-30B-A3B on 16 H100, HybridEP",
        source=BRIDGE,
        told=24.7138,
        unit="s",
        run=partial(published.bridge_qwen3, **HYBRIDEP),
    ),
    Timed(
        what="Qwen3-30B-A3B on 16 H100, all-to-all",
        source=BRIDGE,
        told=42.21,
        unit="s",
        run=published.bridge_qwen3,
    ),
    Timed(
        what="Qwen3-30B-A3B on 16 H100, FP8, HybridEP",
        source=f"{BRIDGE}, 26.06",
        told=8826,
        unit="tokens/s",
        run=partial(published.bridge_qwen3, dispatcher="flex", precision="fp8"),
    ),
    Timed(
        what="Qwen3-235B on 256 H100, FP8, all-to-all, overlap",
        source=f"{BRIDGE}, 26.04.01",
        told=1712,
        unit="tokens/s",
        run=partial(qwen_235b, "h100:256", 8192, tp=2, pp=8, vpp=4, ep=32, precision="fp8", **OVERLAP),
    ),
    Timed(
        what="14 layers of DeepSeek-V3 on 64 H100, all-to-all, MTP",
        source="Megatron-LM #6311",
        told=225.1,
        unit="TFLOPS",
        run=partial(published.overlapped_v3, overlap=False),
    ),
    Timed(
        what="14 layers of DeepSeek-V3 on 64 H100",
        source="Megatron-LM #1913",
        told=321,
        unit="TFLOPS",
        run=partial(published.seed_3a, False),
    ),
    Timed(
        what="DeepSeek-V3 on 256 GB200, ten months older",
        source="Megatron-LM #1913",
        told=945,
        unit="TFLOPS",
        cause="a Megatron-LM ten months older than that of the fitted row",
        run=partial(published.seed_3b, False),
    ),
    Timed(
        what="Moonlight on 8 H100, 4 sequences a step",
        source="Megatron-Bridge, recompute study",
        told=0.45718,
        unit="s",
        cause="one microbatch a step: bound by the host, whose waits are underestimated",
        run=published.bridge_moonlight,
    ),
)
_H100_235B: dict[str, Any] = {"dispatcher": "flex", "recompute": ("layernorm", "moe_act")}
SEEN = (
    Timed(
        what="Qwen3-235B on 256 H100, TP2 EP32 PP8 VPP4, DeepEP",
        source=ZOO,
        told=19.7,
        unit="s",
        run=partial(qwen_235b, "h100:256", 2048, tp=2, ep=32, pp=8, vpp=4, **_H100_235B),
    ),
    Timed(
        what="the same with overlap",
        source=ZOO,
        told=17.6,
        unit="s",
        run=partial(qwen_235b, "h100:256", 2048, tp=2, ep=32, pp=8, vpp=4, **_H100_235B, **OVERLAP),
    ),
    Timed(
        what="Qwen3-235B on 256 H100, TP2 EP8 PP32 VPP3, all-to-all",
        source=ZOO,
        told=24.2,
        unit="s",
        cause="96 stages of one layer: waits between stages are underestimated",
        run=partial(
            qwen_235b, "h100:256", 2048, tp=2, ep=8, pp=32, vpp=3, recompute=("layernorm", "moe_act")
        ),
    ),
    Timed(
        what="Qwen3-235B on 256 H100, TP4 EP8 PP8 VPP4, DeepEP",
        source=ZOO,
        told=29.0,
        unit="s",
        run=partial(qwen_235b, "h100:256", 2048, tp=4, ep=8, pp=8, vpp=4, dispatcher="flex"),
    ),
    Timed(
        what="Qwen3-235B on 256 GB200, bf16, PP8 EP8",
        source=ZOO,
        told=750,
        unit="TFLOPS",
        run=partial(qwen_235b, "gb200:256", 8192, ep=8, pp=8, **TE_GRAPHS),
    ),
    Timed(
        what="Qwen3-235B on 256 GB200, MXFP8, PP4 VPP6 EP64 MBS3, overlap, offload",
        source=ZOO,
        told=919,
        unit="TFLOPS",
        cause="as offload on GB200 elsewhere: what it adds is underestimated",
        run=partial(
            qwen_235b,
            "gb200:256",
            3072,
            ep=64,
            pp=4,
            vpp=6,
            microbatch=3,
            precision="mxfp8",
            recompute=("layernorm", "moe_act"),
            offload=("expert_fc1", "moe_act"),
            overlaps_dispatch=True,
            delays_weight_gradients=True,
            **TE_GRAPHS,
        ),
    ),
)


def long_context(sequence: int, cp: int, told: float) -> Timed:
    return Timed(
        what=f"Qwen3-235B on 256 H100, {sequence:,} tokens, TP4 EP8 PP8 VPP4 CP{cp}",
        source=ZOO,
        told=told,
        unit="TFLOPS",
        cause=LONG_CONTEXT,
        run=partial(
            qwen_235b,
            "h100:256",
            256,
            tp=4,
            cp=cp,
            ep=8,
            pp=8,
            vpp=4,
            sequence=sequence,
            dispatcher="flex",
            recompute=("layernorm", "moe"),
        ),
    )


OLD_BRIDGE = "Megatron-Bridge, performance archive of 26.04.01, recipes of 39d02fe"
HELD_OUT = (
    Timed(
        what="Qwen3-235B on 256 H100, TP2 EP8 FSDP MBS4, full recompute",
        source=ZOO,
        told=17.6,
        unit="s",
        cause="gathers of FSDP and rows sent again are told too slow",
        run=partial(
            qwen_235b,
            "h100:256",
            2048,
            tp=2,
            ep=8,
            pp=1,
            zero=3,
            microbatch=4,
            dispatcher="flex",
            full=True,
        ),
    ),
    Timed(
        what="Qwen3-235B on 256 H100, TP2 EP32 PP8 VPP4, DeepEP, overlap, graphs of the router",
        source=ZOO,
        told=320,
        unit="TFLOPS",
        cause="the source has 276 TFLOPS without graphs: they are worth more than launches",
        run=partial(
            qwen_235b, "h100:256", 2048, tp=2, ep=32, pp=8, vpp=4, graphs=("router",), **_H100_235B, **OVERLAP
        ),
    ),
    long_context(16_384, 1, 295),
    long_context(32_768, 2, 335),
    long_context(65_536, 4, 368),
    long_context(131_072, 8, 389),
    Timed(
        what="Qwen3-235B on 128 GB200, MXFP8, 131,072 tokens, TP4 CP4 EP32 PP4 VPP12",
        source=ZOO,
        told=1150,
        unit="TFLOPS",
        cause=LONG_CONTEXT,
        run=partial(
            qwen_235b,
            "gb200:128",
            1024,
            tp=4,
            cp=4,
            ep=32,
            pp=4,
            vpp=12,
            sequence=131_072,
            precision="mxfp8",
            **_H100_235B,
        ),
    ),
    Timed(
        what="Mixtral-8x22B on 128 H100, TP2 EP8 PP8 VPP7, all-to-all",
        source=ZOO,
        told=465,
        unit="TFLOPS",
        run=partial(
            run,
            MIXTRAL_8X22B,
            "h100:128",
            {"tp": 2, "ep": 8, "pp": 8, "vpp": 7, "schedule": INTERLEAVED},
            global_batch=256,
        ),
    ),
    Timed(
        what="DeepSeek-V3 on 1,024 H100, FP8, TP2 EP64 PP8 VPP4, DeepEP, overlap",
        source=f"{REPORT}, layout of {ZOO}",
        told=368,
        unit="TFLOPS",
        run=partial(
            deepseek_v3,
            "h100:1024",
            8192,
            tp=2,
            ep=64,
            pp=8,
            vpp=4,
            precision="fp8",
            dispatcher="flex",
            recompute=("mla_up_proj", "mlp", "moe_act", "layernorm"),
            **OVERLAP,
        ),
    ),
    Timed(
        what="DeepSeek-V3 on 256 GB200, MXFP8, PP4 VPP4 EP64, layer graphs",
        source=f"{REPORT}, layout of {ZOO}",
        told=1048,
        unit="TFLOPS",
        cause="the same layout has 4,256 tokens/s in a later version",
        run=partial(
            deepseek_v3,
            "gb200:256",
            8192,
            tp=1,
            ep=64,
            pp=4,
            vpp=4,
            precision="mxfp8",
            recompute=("mlp",),
            **TE_GRAPHS,
        ),
    ),
    Timed(
        what="DeepSeek-V3 on 256 GB200, bf16, PP4 VPP4 EP64, layer graphs",
        source=f"{REPORT}, homes of Megatron-Bridge's recipe 39d02fe",
        told=857,
        unit="TFLOPS",
        run=partial(
            deepseek_v3,
            "gb200:256",
            8192,
            tp=1,
            ep=64,
            pp=4,
            vpp=4,
            recompute=("mla_up_proj",),
            **TE_GRAPHS,
        ),
    ),
    Timed(
        what="DeepSeek-V3 on 256 GB200, MXFP8, PP4 VPP4 EP64, layer graphs, Bridge",
        source=OLD_BRIDGE,
        told=4256,
        unit="tokens/s",
        run=partial(
            deepseek_v3,
            "gb200:256",
            4096,
            tp=1,
            ep=64,
            pp=4,
            vpp=4,
            precision="mxfp8",
            recompute=("mlp",),
            **TE_GRAPHS,
        ),
    ),
    Timed(
        what="DeepSeek-V3 on 256 B200, MXFP8, PP8 VPP2 EP32, DeepEP, overlap",
        source=OLD_BRIDGE,
        told=3328,
        unit="tokens/s",
        cause="no constant of a B200: that of a GB200",
        run=partial(
            deepseek_v3,
            "b200:256",
            4096,
            tp=1,
            ep=32,
            pp=8,
            vpp=2,
            precision="mxfp8",
            recompute=("mla_up_proj", "mlp"),
            **TE_GRAPHS,
            **OVERLAP,
        ),
    ),
    Timed(
        what="gpt-oss-120b on 64 GB200, bf16, EP64 MBS4, all-to-all, overlap",
        source=OLD_BRIDGE,
        told=16640,
        unit="tokens/s",
        cause=SINKS,
        run=partial(gpt_oss, "gb200:64", ep=64, microbatch=4, recompute=("layernorm", "moe_act"), **OVERLAP),
    ),
    Timed(
        what="gpt-oss-120b on 64 B200, bf16, EP8 MBS4, HybridEP",
        source=OLD_BRIDGE,
        told=13568,
        unit="tokens/s",
        cause=SINKS,
        run=partial(
            gpt_oss,
            "b200:64",
            ep=8,
            microbatch=4,
            recompute=("layernorm", "moe_act"),
            dispatcher="flex",
        ),
    ),
    Timed(
        what="gpt-oss-120b on 64 H100, bf16, PP4 EP8, all-to-all",
        source=OLD_BRIDGE,
        told=5824,
        unit="tokens/s",
        cause=SINKS,
        run=partial(gpt_oss, "h100:64", pp=4, ep=8, recompute=("layernorm", "moe_act")),
    ),
    Timed(
        what="gpt-oss-120b on 64 GB200, MXFP8, EP64 MBS4, full-iteration graphs",
        source=f"{BRIDGE}, 26.08",
        told=28672,
        unit="tokens/s",
        cause=SINKS,
        run=partial(gpt_oss, "gb200:64", ep=64, microbatch=4, precision="mxfp8", **FULL_ITERATION),
    ),
    Timed(
        what="Qwen3-30B-A3B on 8 GB200, MXFP8, HybridEP, graphs of the router",
        source=OLD_BRIDGE,
        told=26112,
        unit="tokens/s",
        run=partial(
            run,
            QWEN3_30B,
            "gb200:8",
            {"ep": 8},
            global_batch=512,
            microbatch=4,
            precision="mxfp8",
            **HYBRIDEP,
        ),
    ),
    Timed(
        what="Qwen3-30B-A3B on 8 B200, MXFP8, HybridEP, layer graphs",
        source=OLD_BRIDGE,
        told=27136,
        unit="tokens/s",
        run=partial(
            run,
            QWEN3_30B,
            "b200:8",
            {"ep": 8},
            global_batch=512,
            microbatch=4,
            precision="mxfp8",
            **TE_GRAPHS,
        ),
    ),
    Timed(
        what="Qwen3-235B on 256 GB200, MXFP8, PP8 VPP3 EP32, layer graphs",
        source=OLD_BRIDGE,
        told=5680,
        unit="tokens/s",
        cause="1,600 tokens/s less than the same layout in 26.08: an older version",
        run=partial(qwen_235b, "gb200:256", 8192, ep=32, pp=8, vpp=3, precision="mxfp8", **TE_GRAPHS),
    ),
    Timed(
        what="Qwen3-235B on 256 B200, MXFP8, PP8 EP8, all-to-all",
        source=OLD_BRIDGE,
        told=3776,
        unit="tokens/s",
        cause="a launch for each expert, 50 us each: they are grouped there",
        run=partial(qwen_235b, "b200:256", 8192, ep=8, pp=8, precision="mxfp8"),
    ),
    Timed(
        what="Qwen3-30B-A3B on 32 H100, PP4 EP8, DualPipeV",
        source="Pith-Train #16, the mean of its log",
        told=17.7,
        unit="s",
        cause="another framework: kernels and launches are those of Megatron-LM",
        run=partial(published.seed_4, dispatcher="flex", overlaps_dispatch=True),
    ),
)
