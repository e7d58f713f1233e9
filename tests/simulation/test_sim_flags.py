"""Launch flags: those that other programs know, with values that they take."""

import re
import shlex
from dataclasses import replace
from functools import cache

import pytest
import typer.main
from typer.testing import CliRunner

from pagestash.cli import app
from pagestash.models.config import preset
from pagestash.simulation.cluster.cluster import read_cluster
from pagestash.simulation.cluster.layout import Layout, place_as_torchtitan
from pagestash.simulation.costs.build import rank_peaks
from pagestash.simulation.model.framework import FRAMEWORKS, ParameterBytes
from pagestash.simulation.model.homes import MegatronHomes
from pagestash.simulation.model.run import Run
from pagestash.simulation.search.flags import (
    megatron_flags,
    pagestash_flags,
    torchtitan_flags,
)
from pagestash.simulation.search.layouts import Wanted
from pagestash.simulation.search.layouts import runs as search_runs
from pagestash.sizes import format_bytes
from pagestash.train.config import checked, merge, parse_assignments

# What is printed, checked by hand against Megatron-LM d98e8a64dd (core 0.20, 22 August 2026): `megatron/training/
# arguments.py`, `megatron/core/transformer/transformer_config.py`. None: a flag without a value.
MEGATRON = {
    **dict.fromkeys(
        (
            "--tensor-model-parallel-size",
            "--context-parallel-size",
            "--pipeline-model-parallel-size",
            "--expert-model-parallel-size",
            "--expert-tensor-parallel-size",
            "--micro-batch-size",
            "--global-batch-size",
            "--seq-length",
            "--recompute-num-layers",
        ),
        r"\d+",
    ),
    **dict.fromkeys(
        (
            "--sequence-parallel",
            "--moe-grouped-gemm",
            "--bf16",
            "--use-distributed-optimizer",
            "--use-megatron-fsdp",
            "--fine-grained-activation-offloading",
            "--moe-enable-deepep",
            "--overlap-moe-expert-parallel-comm",
            "--delay-wgrad-compute",
            "--grad-reduce-in-bf16",
            "--use-precision-aware-optimizer",
        ),
        None,
    ),
    "--moe-token-dispatcher-type": "allgather|alltoall|flex",
    "--pipeline-model-parallel-layout": r"[EtL|()*\d]+",
    "--recompute-granularity": "full|selective",
    "--recompute-method": "uniform|block",
    "--recompute-modules": "(( ?)(moe_act|layernorm|mla_up_proj|shared_experts|moe))+",
    "--offload-modules": "(( ?)(core_attn|expert_fc1|moe_act|attn_norm|mlp_norm))+",
    "--cuda-graph-impl": "transformer_engine|full_iteration",
    "--cuda-graph-scope": "(( ?)(attn|moe_router|moe_preprocess|mlp))+",
    "--exp-avg-dtype": "bf16",
    "--exp-avg-sq-dtype": "bf16",
    "--fp8-format": "e4m3|hybrid",
    "--fp8-recipe": "tensorwise|mxfp8",
    "--data-parallel-sharding-strategy": "optim_grads|optim_grads_params",
    "--ckpt-format": "fsdp_dtensor",
}
# Checked by hand against torchtitan b5bcd76c66 (21 August 2026): `torchtitan/config/configs.py`, `trainer.py`,
# `distributed/pipeline_parallel.py`, `distributed/activation_checkpoint.py`.
TORCHTITAN = {
    **dict.fromkeys(
        (
            "--parallelism.tensor_parallel_degree",
            "--parallelism.context_parallel_degree",
            "--parallelism.pipeline_parallel_degree",
            "--parallelism.pipeline_parallel_layers_per_stage",
            "--parallelism.pipeline_parallel_first_stage_less_layers",
            "--parallelism.pipeline_parallel_last_stage_less_layers",
            "--parallelism.num_pp_microbatches",
            "--parallelism.expert_parallel_degree",
            "--training.num_tokens_per_microbatch_per_dp_rank",
            "--training.num_tokens_per_train_step",
            "--training.max_context_length",
        ),
        r"\d+",
    ),
    "--parallelism.data_parallel_shard_degree": r"-1|\d+",
    "--parallelism.pipeline_parallel_schedule": "1F1B|Interleaved1F1B",
    "--parallelism.fsdp_reshard_after_forward": "default|always|never",
    "--training.disable_cuda_graphs": None,
}

HOMES = {
    "none": MegatronHomes(),
    "norms": MegatronHomes(recompute=("layernorm",)),
    "offload": MegatronHomes(offload=("moe_act", "core_attn")),
    "both": MegatronHomes(recompute=("layernorm", "mla_up_proj"), offload=("expert_fc1",)),
    "layers": MegatronHomes(recompute=("layernorm", "moe")),
    "whole": MegatronHomes(full=True),
}


def run(devices="gb200:64", *, model="deepseek-v3", layers=None, **more) -> Run:
    cluster = read_cluster(devices)
    other = {name: more.pop(name) for name in ("precision", "global_batch", "microbatch") if name in more}
    return Run(
        config=preset(model, layers),
        cluster=cluster,
        layout=Layout(devices=cluster.devices, **more),
        sequence=4096,
        **{"global_batch": 256, **other},
    )


@cache
def runs(framework: str = "pagestash") -> list[Run]:
    """Layouts of every kind: all that a search of 61 layers looks at on 64 devices, and other ZeRO, precision."""
    made = replace(run(), framework=FRAMEWORKS[framework])
    found = list(search_runs(Wanted(base=made, microbatches=(1,))))
    more = [
        run(zero=zero, tp=2, ep=8, precision=name)
        for zero, name in enumerate(("fp32", "fp8", "mxfp8", "bf16"))
    ]
    return [*found, *more]


def words_of(flags: list[str]) -> dict[str, str | None]:
    """The flags as a shell would pass them: names and values."""
    found: dict[str, str | None] = {}
    name = ""
    for word in shlex.split(" ".join(flags)):
        if word.startswith("--"):
            assert word not in found, f"{word} twice"
            name, found[word] = word, None
        else:
            found[name] = word if found[name] is None else f"{found[name]} {word}"
    return found


def check(words: dict[str, str | None], known: dict[str, str | None]) -> None:
    for name, value in words.items():
        assert name in known
        wanted = known[name]
        assert (value is None) if wanted is None else re.fullmatch(wanted, value or ""), (name, value)


@pytest.mark.parametrize("homes", HOMES.values(), ids=HOMES)
def test_megatron_knows_every_flag_and_allows_them_together(homes):
    for made in runs():
        words, layout = words_of(megatron_flags(replace(made, homes=homes))), made.layout
        check(words, MEGATRON)
        # Its rules: `validate_args`, `TransformerConfig.__post_init__`, `PipelineParallelLayerLayout`.
        assert ("--sequence-parallel" in words) == (layout.tp > 1)
        assert ("--use-megatron-fsdp" in words) == ("--ckpt-format" in words) == (layout.zero >= 2)
        assert "--use-distributed-optimizer" in words or not layout.zero
        if words.get("--recompute-granularity") == "selective":
            assert not {"--recompute-method", "--recompute-num-layers"} & {*words}
        if words.get("--recompute-granularity") == "full":
            assert {"--recompute-method", "--recompute-num-layers"} <= {*words}
            assert not {"--recompute-modules", "--offload-modules"} & {*words}
        if "--fp8-format" in words:
            assert "--bf16" in words
        if layout.pp > 1:
            stages = unrolled(words["--pipeline-model-parallel-layout"]).split("|")
            assert [stage.count("t") for stage in stages] == made.placed
            assert (stages[0][:1], stages[-1][-1:]) == ("E", "L")
            assert len(stages) % layout.pp == 0
        else:
            assert "--pipeline-model-parallel-layout" not in words


def unrolled(text: str) -> str:
    """Megatron's reading of a layout: `(tt|)*3` is `tt|tt|tt|`."""
    return re.sub(r"\(([^)]+)\)\*(\d+)", lambda found: found[1] * int(found[2]), text)


@pytest.mark.parametrize("homes", HOMES.values(), ids=HOMES)
def test_torchtitan_knows_every_flag_and_allows_them_together(homes):
    for made in runs("torchtitan"):
        layout = made.layout
        *flags, last = torchtitan_flags(replace(made, homes=homes))
        assert re.fullmatch("activation-checkpoint:(full|none)", last)
        words = words_of(flags)
        check(words, TORCHTITAN)
        assert "--training.disable_cuda_graphs" in words or layout.pp == layout.ep == 1
        tokens = int(words["--training.num_tokens_per_microbatch_per_dp_rank"] or 0)
        assert tokens % (layout.tp * (2 * layout.cp if layout.cp > 1 else 1)) == 0
        if layout.pp > 1:
            tokens *= int(words["--parallelism.num_pp_microbatches"] or 0)
            each, before, after = (
                int(words[f"--parallelism.pipeline_parallel_{name}"] or 0)
                for name in ("layers_per_stage", "first_stage_less_layers", "last_stage_less_layers")
            )
            effective = made.config.layers + before + after
            assert -(-effective // each) == layout.stages
            assert (before, after) == (1, 1)
            assert place_as_torchtitan(made.config.layers, layout.stages) == made.placed
        assert int(words["--training.num_tokens_per_train_step"] or 0) % (tokens * layout.dp) == 0


def test_stages_that_torchtitan_has_no_flag_for_are_one_sentence():
    with pytest.raises(ValueError, match="no flag for 9 layers on 8 stages"):
        torchtitan_flags(run(layers=9, pp=2, vpp=4, ep=8, schedule="Interleaved1F1B"))


def test_torchtitan_divides_layers_evenly_with_the_embedding_and_the_head():
    assert place_as_torchtitan(14, 4) == [3, 4, 4, 3]
    assert place_as_torchtitan(15, 4) == [4, 4, 4, 3]
    assert place_as_torchtitan(2, 4) == [0, 1, 1, 0]
    assert place_as_torchtitan(9, 8) is None  # two layers a stage are six stages
    assert place_as_torchtitan(1, 4) is None


def test_megatron_is_told_how_the_run_was_simulated():
    made = replace(
        run(pp=4, ep=8),
        dispatcher="flex",
        overlaps_dispatch=True,
        delays_weight_gradients=True,
        graphs=("attn", "router"),
        parameters=ParameterBytes(weight=2, gradient=2, optimizer=8),
    )
    words = words_of(megatron_flags(made))
    check(words, MEGATRON)
    assert words["--moe-token-dispatcher-type"] == "flex"
    assert words["--cuda-graph-scope"] == "attn moe_router moe_preprocess"
    for name in ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute", "--grad-reduce-in-bf16"):
        assert name in words
    full = words_of(megatron_flags(replace(made, graphs=("full",))))
    assert full["--cuda-graph-impl"] == "full_iteration"


def test_flags_for_deepseek_v3_on_gb200_are_those_of_the_plan(tmp_path):
    words = ["plan", "--cluster", "gb200:256", "--framework", "megatron", "--global-batch", "8192"]
    more = ["--pp", "4", "--ep", "64", "--vpp", "4", "--microbatch", "2", "--out", str(tmp_path / "plan")]
    done = CliRunner().invoke(app, [*words, *more])
    assert done.exit_code == 0, done.output
    assert not list((tmp_path / "plan").glob("policy*"))
    flags = words_of([(tmp_path / "plan" / "flags.txt").read_text().replace("\\\n", "")])
    check(flags, MEGATRON)
    told = run("gb200:256", pp=4, ep=64, vpp=4, schedule="Interleaved1F1B", global_batch=8192, microbatch=2)
    homes = MegatronHomes(
        recompute=tuple((flags.get("--recompute-modules") or "").split()),
        offload=tuple((flags.get("--offload-modules") or "").split()),
        full=flags.get("--recompute-granularity") == "full",
    )
    told = replace(told, homes=homes, framework=FRAMEWORKS["megatron"])
    stages = unrolled(flags["--pipeline-model-parallel-layout"]).split("|")
    assert [stage.count("t") for stage in stages] == told.placed
    device = told.cluster.device
    most = max(peak.total for peak in rank_peaks(told)) + device.outside
    assert most <= 0.94 * device.memory
    assert f"memory  {format_bytes(most)} of 184.0 GiB" in done.output
    assert "6 % are left" in done.output
    assert f"homes   {homes}" in done.output


def test_our_parser_and_settings_take_every_flag():
    train = typer.main.get_command(app).commands["train"]
    seen = 0
    for made in runs():
        layout = made.layout
        if layout.tp > 1 or layout.cp > 1:
            with pytest.raises(ValueError, match="no tensor or context parallel ranks"):
                pagestash_flags(made, "policy.toml")
            continue
        words = shlex.split(" ".join(pagestash_flags(made, "policy.toml")))
        parsed = train.make_context("train", ["--out", "run", *words])
        given = {
            "pipeline": parsed.params["pp"],
            "schedule": parsed.params["schedule"],
            "expert_parallel": parsed.params["ep"],
        }
        given = {key: value for key, value in given.items() if value is not None}
        settings = merge(parse_assignments(parsed.params["assignments"]), checked(given))
        assert (settings.pipeline, settings.expert_parallel) == (layout.pp, layout.ep)
        assert settings.parts == made.microbatches
        assert settings.tokens == made.microbatch * made.sequence
        assert layout.vpp == 1 or settings.chunks == layout.vpp
        seen += 1
    assert seen > 20


def test_a_flag_that_our_parser_does_not_know_would_be_noticed():
    done = CliRunner().invoke(app, ["train", "--out", "run", "--pipelines", "2"])
    assert done.exit_code == 2
    assert "No such option: --pipelines" in done.stderr
