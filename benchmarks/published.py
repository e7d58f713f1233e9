"""Published runs that have enough configuration to be simulated, by the rules of docs/simulate.md.

A name is a source; what is simulated of it is a `Run`. Time and memory rows read the same runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pagestash.models.config import DecoderConfig, preset
from pagestash.simulation.cluster.cluster import read_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.model.framework import FRAMEWORKS, ParameterBytes
from pagestash.simulation.model.homes import MegatronHomes
from pagestash.simulation.model.run import Run

MEGATRON, PITH = FRAMEWORKS["megatron"], FRAMEWORKS["pith"]
DEEPSEEK_V3, QWEN3_30B = preset("deepseek-v3"), preset("qwen3-30b-a3b")
MOONLIGHT = DecoderConfig(
    vocab=163_840,
    width=2048,
    layers=27,
    heads=16,
    attention="mla",
    kv_rank=512,
    nope_dim=128,
    rope_dim=64,
    v_dim=128,
    dense_layers=1,
    dense_width=11_264,
    experts=64,
    top_k=6,
    expert_width=1408,
    shared_experts=2,
    score="sigmoid",
)
QWEN3_235B = DecoderConfig(
    vocab=151_936,
    width=4096,
    layers=94,
    heads=64,
    kv_heads=4,
    head_dim=128,
    qk_norm=True,
    experts=128,
    top_k=8,
    expert_width=1536,
)
THIRTY_TWO_STAGES = [1, *[2] * 30, 0]
"""Megatron-Bridge's layout of DeepSeek-V3 on 32 stages, without its MTP: `Et|(tt|)*30mL`."""
SIXTEEN_STAGES = [*[4] * 15, 1]
"""Its layout on 16 stages: `Et*4|(tttt|)*14tmL`."""
FULL_ITERATION: dict[str, Any] = {
    "dispatcher": "flex",
    "overlaps_dispatch": True,
    "delays_weight_gradients": True,
    "graphs": ("full",),
    "capacity": 1.5,
    "stash": True,
}
"""Megatron-Bridge's MXFP8 recipes of 26.08: HybridEP, overlap, full-iteration graphs, and a paged stash."""


def run(
    config: DecoderConfig,
    cluster: str,
    layout: dict[str, Any],
    *,
    global_batch: int,
    offload: Sequence[str] = (),
    recompute: Sequence[str] = (),
    stash: bool = False,
    full: bool = False,
    **values: Any,
) -> Run:
    """A run of a framework that keeps what Megatron-LM's options say."""
    found = read_cluster(cluster)
    made = {"sequence": 4096, "framework": MEGATRON, **values}
    return Run(
        config=config,
        cluster=found,
        layout=Layout(devices=found.devices, **layout),
        global_batch=global_batch,
        homes=MegatronHomes(recompute=tuple(recompute), offload=tuple(offload), stash=stash, full=full),
        **made,
    )


def seed_3a(offload: bool) -> Run:
    """Megatron-LM #1913 on H100: DeepSeek-V3's layers, 14 with experts, TP1 PP4 EP16, MBS 1 GBS 512, bf16.

    The number of GPUs is not stated; 64 is the least. More would share the optimizer's state further, alike before
    and after. So is the dispatcher not: DeepEP, as in Megatron-Bridge's recipe of DeepSeek-V3 on H100.
    """
    names = ("expert_fc1", "moe_act", "attn_norm", "mlp_norm")
    return run(
        replace(DEEPSEEK_V3, layers=14, dense_layers=0),
        "h100:64",
        {"pp": 4, "ep": 16},
        global_batch=512,
        dispatcher="flex",
        offload=names if offload else (),
    )


def seed_3b(offload: bool) -> Run:
    """Megatron-LM #1913 on GB200: DeepSeek-V3 without MTP, TP1 PP8 EP32 VPP4, MBS 1 GBS 2048, MXFP8.

    HybridEP, and CUDA graphs of attention and router, as in Megatron-Bridge's recipe of that year.
    """
    return run(
        DEEPSEEK_V3,
        "gb200:256",
        {"pp": 8, "ep": 32, "vpp": 4, "schedule": "Interleaved1F1B"},
        global_batch=2048,
        precision="mxfp8",
        dispatcher="flex",
        graphs=("attn", "router"),
        placement=THIRTY_TWO_STAGES,
        offload=("moe_act",) if offload else (),
    )


def seed_4(**values: Any) -> Run:
    """Pith-Train #16: Qwen3-30B-A3B under DualPipeV, GBS 1024 x 4,096 tokens."""
    return run(
        QWEN3_30B,
        "h100:32",
        {"pp": 4, "vpp": 2, "ep": 8, "schedule": "DualPipeV"},
        global_batch=1024,
        framework=PITH,
        parameters=ParameterBytes(weight=2, gradient=4, optimizer=12),
        **values,
    )


def bridge_qwen3(recompute: Sequence[str] = (), **values: Any) -> Run:
    """Megatron-Bridge: Qwen3-30B-A3B on 16 H100, bf16, EP16, MBS 1 GBS 1024; all-to-all and no graphs by itself."""
    return run(
        QWEN3_30B,
        "h100:16",
        {"ep": 16},
        global_batch=1024,
        recompute=recompute,
        parameters=ParameterBytes(weight=2, gradient=2, optimizer=12),
        **values,
    )


HYBRIDEP: dict[str, Any] = {"dispatcher": "flex", "graphs": ("router",)}
"""Its performance recipe: HybridEP, and graphs of `moe_router` and `moe_preprocess`."""


def bridge_moonlight(recompute: Sequence[str] = ()) -> Run:
    """Megatron-Bridge: Moonlight-16B on 8 H100, bf16, TP2 EP8, MBS 1 GBS 4."""
    return run(
        MOONLIGHT,
        "h100:8",
        {"tp": 2, "ep": 8},
        global_batch=4,
        recompute=recompute,
        parameters=ParameterBytes(weight=2, gradient=2, optimizer=8),
    )


def report_v3(recompute: Sequence[str] = (), **values: Any) -> Run:
    """arXiv 2603.07685: DeepSeek-V3 on 256 GPUs, bf16, PP4 VPP4 EP64; the batch does not change what is held."""
    return run(
        replace(DEEPSEEK_V3, mtp_layers=1),
        "gb200:256",
        {"pp": 4, "ep": 64, "vpp": 4, "schedule": "Interleaved1F1B"},
        global_batch=4096,
        placement=SIXTEEN_STAGES,
        recompute=recompute,
        **values,
    )


def overlapped_v3(overlap: bool) -> Run:
    """Megatron-LM #6311 and #6429: 14 layers of DeepSeek-V3 and MTP, 64 H100, TP1 PP4 VPP2 EP16, 2,048 tokens.

    MBS 1 GBS 256, all-to-all, layout `Ett|(tt|)*6mL`. Bytes a parameter are not stated.
    """
    return run(
        replace(DEEPSEEK_V3, layers=14, dense_layers=0, mtp_layers=1),
        "h100:64",
        {"pp": 4, "ep": 16, "vpp": 2, "schedule": "Interleaved1F1B"},
        global_batch=256,
        sequence=2048,
        placement=[*[2] * 7, 0],
        overlaps_dispatch=overlap,
    )


MOONLIGHT_RUNS: dict[tuple[str, ...], tuple[float, float]] = {
    (): (36.618, 457.18),
    ("core_attn",): (36.614, 474.80),
    ("mla_up_proj",): (35.902, 480.89),
    ("mla_up_proj", "mlp"): (35.917, 496.73),
    ("moe_act",): (35.941, 466.26),
    ("layernorm", "moe_act"): (35.949, 506.53),
}
"""By what is recomputed: peak in 10^9 bytes, and milliseconds of a step."""
