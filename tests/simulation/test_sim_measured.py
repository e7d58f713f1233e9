"""Times of a profile, and policies of a plan, in a simulated step."""

import json
from dataclasses import replace

import pytest
import torch
from support.search import search_little
from support.simulated import one_batch
from typer.testing import CliRunner

import pagestash as ps
from pagestash.cli import app
from pagestash.models import Decoder, preset
from pagestash.policy import Policy, Rule
from pagestash.simulation.cluster.cluster import load_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.build import step_costs
from pagestash.simulation.costs.measured import measured, profiled_run
from pagestash.simulation.costs.seconds import Seconds
from pagestash.simulation.model.homes import PolicyHomes
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.regions import check_policy, part_of, split
from pagestash.simulation.model.run import Run

TINY = preset("tiny", layers=3)
BATCH, SEQUENCE = 2, 64
H100 = load_cluster("h100", 1)


@pytest.fixture(scope="module")
def profile():
    tokens = torch.randint(0, 256, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    model = Decoder(TINY)
    model.initialise(0)
    return ps.profile(model, (tokens[:, :-1], tokens[:, 1:]), repeats=1)


def run(**more) -> Run:
    values = {
        "config": TINY,
        "cluster": H100,
        "layout": Layout(devices=1),
        "sequence": SEQUENCE,
        "global_batch": BATCH,
        "microbatch": BATCH,
        "precision": "fp32",
    }
    return Run(**values | more)


def compute(made: Run) -> float:
    """Seconds of forward and backward of all layers, for one microbatch."""
    kinds = ("forward", "backward_input", "backward_weight")
    return sum(getattr(layer, kind).total for layer in step_costs(made).stages[0].layers for kind in kinds)


# --- times of a profile ---


def test_batch_sequence_layers_and_precision_are_the_profiles(profile):
    made = profiled_run(profile, preset("tiny"), H100)
    found = made.microbatch, made.sequence, made.config.layers, made.precision
    assert found == (BATCH, SEQUENCE, 3, "fp32")


def test_the_profiled_step_takes_what_was_measured(profile):
    found = measured(profile, TINY, H100)
    assert found.notes() == []
    wanted = profile.forward_seconds + profile.backward_seconds
    assert compute(run(factors=found.factors)) == pytest.approx(wanted, rel=1e-9)


def test_each_part_takes_what_its_regions_took(profile):
    made = profiled_run(profile, TINY, H100)
    timed = Seconds(replace(made, factors=measured(profile, TINY, H100).factors))
    own = {
        "moe.router": ("moe", "moe.router"),
        "attn.core_attn": ("attn.core_attn",),
        "attn.q_norm": ("attn", "attn.q_norm", "attn.k_norm", "attn.rope"),
    }
    for name, regions in own.items():
        wanted = sum(
            region.forward_seconds
            for region in profile.regions
            for inner in regions
            if region.name.startswith("layers.") and region.name.split(".", 2)[2:] == [inner]
        )
        told = sum(
            timed.forward(part) for layer in layers_of(made) for part in layer.parts if part.name == name
        )
        assert told == pytest.approx(wanted, rel=1e-9)


def test_measured_times_scale_with_the_devices_roofline(profile):
    factors, faster = measured(profile, TINY, H100).factors, load_cluster("b200", 1)
    big = one_batch(preset("qwen3-30b-a3b", layers=1), Layout(devices=1), sequence=4096)
    seen = 0
    for part in layers_of(big)[1].parts:
        if part.operations > 1e11:
            runs = (replace(big, cluster=cluster) for cluster in (H100, faster))
            (plain, one), (quick, other) = (
                (Seconds(own).forward(part), Seconds(replace(own, factors=factors)).forward(part))
                for own in runs
            )
            assert one / other == pytest.approx(plain / quick)
            seen += 1
    assert seen


def test_a_profile_of_another_device_is_scaled(profile):
    slow = measured(profile, TINY, H100).factors
    fast = measured(profile, TINY, load_cluster("b200", 1)).factors
    assert slow["attn.qkv_linear"][0] < fast["attn.qkv_linear"][0]  # the faster device should have taken less


def test_what_is_in_no_part_is_said_by_name(profile):
    odd = replace(profile.regions[3], name="layers.1.adapter", forward_seconds=0.002, backward_seconds=0.001)
    found = measured(replace(profile, regions=[*profile.regions, odd]), TINY, H100)
    assert found.uncounted == {"layers.*.adapter": pytest.approx(0.003)}
    assert "layers.*.adapter (3.00 ms)" in found.notes()[0]


def test_parts_that_were_not_profiled_are_said_by_name(profile):
    found = measured(profile, replace(TINY, dense_layers=0, shared_experts=1), H100)
    assert found.estimated == ("moe.shared_experts",)
    assert "moe.shared_experts" in found.notes()[0]


def test_the_profile_of_another_model_is_refused(profile):
    with pytest.raises(ValueError, match="a width of 128, not 2048"):
        measured(profile, preset("qwen3-30b-a3b"), H100)
    later = [region for region in profile.regions if not region.name.startswith("layers.0")]
    with pytest.raises(ValueError, match="expected regions of consecutive layers"):
        measured(replace(profile, regions=later), TINY, H100)


def test_simulate_and_plan_take_a_profile(profile, tmp_path):
    path, out = tmp_path / "profile.json", tmp_path / "out.json"
    profile.save(path)
    words = ["--preset", "tiny", "--layers", "3", "--seq", str(SEQUENCE), "--profile", str(path)]
    step = ["--cluster", "h100:1", "--microbatch", "2", "--global-batch", "2", "--precision", "fp32"]
    done = CliRunner().invoke(app, ["simulate", *words, *step, "--json", str(out)])
    assert done.exit_code == 0, done.output
    (rank,) = json.loads(out.read_text())["ranks"]
    assert rank["compute"] == pytest.approx(profile.forward_seconds + profile.backward_seconds, rel=1e-9)
    done = CliRunner().invoke(
        app, ["plan", *words, "--cluster", "b200:2", "--global-batch", "4", "--profiled-on", "h100"]
    )
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["simulate", "--cluster", "h100:1", "--profiled-on", "h100"])
    assert done.exit_code == 2
    assert "there is none" in done.stderr


@pytest.mark.parametrize(
    ("name", "layer", "part"),
    [
        ("layers.3.attn.k_norm", "layers.3", "attn.q_norm"),
        ("layers.3.attn", "layers.3", "attn.q_norm"),
        ("layers.3.attn.rope", "layers.3", "attn.q_norm"),
        ("layers.3", "layers.3", "mlp_norm"),
        ("layers.3.moe.moe_act", "layers.3", "moe.experts"),
        ("model.layers.3.self_attn.v_proj", "layers.3", "attn.qkv_linear"),
        ("model.layers.3.post_attention_layernorm", "layers.3", "mlp_norm"),
        ("model.layers.3.mlp.experts.expert_fc1", "layers.3", "moe.experts"),
        ("model.layers.3.mlp", "layers.3", "moe.router"),
        ("model.layers.3.unheard", "layers.3", ""),
    ],
)
def test_regions_of_a_model_have_parts(name, layer, part):
    shape = one_batch(preset("qwen3-30b-a3b", layers=1), Layout(devices=1), sequence=64)
    found, inner = split(name)
    assert found == layer
    assert part_of(inner, [p.name for p in layers_of(shape)[1].parts]) == part


# --- policies of a plan ---


def test_a_planned_policy_is_simulated_and_takes_less(profile, tmp_path, monkeypatch):
    search_little(monkeypatch)
    path, policy, out = (tmp_path / name for name in ("profile.json", "policy.toml", "out.json"))
    profile.save(path)
    plan = ["plan", "--profile", str(path), "--budget", "0.5", "--host", "1GiB", "--out", str(policy)]
    done = CliRunner().invoke(app, plan)
    assert done.exit_code == 0, done.output
    assert Policy.load(policy).rules
    words = ["simulate", "--preset", "tiny", "--layers", "3", "--seq", str(SEQUENCE), "--cluster", "h100:1"]
    step = ["--microbatch", "2", "--global-batch", "2", "--precision", "fp32", "--json", str(out)]
    peaks = []
    for more in ([], ["--policy", str(policy)]):
        done = CliRunner().invoke(app, [*words, *step, *more])
        assert done.exit_code == 0, done.output
        peaks.append(json.loads(out.read_text())["ranks"][0]["peak_bytes"])
    assert peaks[1] < peaks[0]


def kept(config, rules) -> int:
    made = run(config=config, precision="bf16", homes=PolicyHomes(Policy(rules)))
    return sum(int(layer.bytes_of("keep").total) for layer in step_costs(made).stages[0].layers)


def test_hugging_faces_names_are_ours():
    config = preset("qwen3-30b-a3b", layers=2)
    ours = [
        Rule("layers.*.attn_norm", "recompute"),
        Rule("layers.1.moe.moe_act", "offload", min_bytes=0),
        Rule("layers.*.attn.qkv_linear", "recompute"),
    ]
    theirs = [
        Rule("model.layers.*.input_layernorm", "recompute"),
        Rule("model.layers.1.mlp.experts.moe_act", "offload", min_bytes=0),
        Rule("model.layers.*.self_attn.q_proj", "recompute"),
    ]
    assert kept(config, ours) == kept(config, theirs) < kept(config, [])


def test_the_up_projection_of_keys_and_values_has_a_rule_of_its_own():
    config = preset("deepseek-v3", layers=4)
    rule = Rule("layers.*.attn.qkv_linear.kv_up", "recompute")
    values = config.heads * (config.nope_dim + config.v_dim)
    assert kept(config, []) - kept(config, [rule]) == 4 * 2 * BATCH * SEQUENCE * values


def test_rotated_heads_are_dropped_if_what_they_are_made_from_is_there():
    """Norms' results would wait in their stead; without norms it is the projection, which waits anyway."""
    config = preset("qwen3-30b-a3b", layers=2)
    rope, norms = (Rule(f"layers.*.attn.{name}", "recompute") for name in ("rope", "q_norm"))
    rotated = 2 * 2 * BATCH * SEQUENCE * (config.heads + config.kv_heads) * config.head_size
    for each in ([], [norms]):
        dropped = kept(config, each) - kept(config, [rope, *each])
        assert dropped == (rotated if each else 0)
    plain = replace(config, qk_norm=False)
    assert kept(plain, []) - kept(plain, [rope]) == rotated


def test_rules_without_a_part_of_their_own_are_named(tmp_path):
    policy = tmp_path / "policy.toml"
    both = Policy([Rule("layers.*.attn.q_norm", "recompute"), Rule("layers.*.attn.k_norm", "recompute")])
    layers = layers_of(run())
    assert check_policy(both, layers) == ["layers.*.attn.k_norm"]
    both.save(policy)
    words = ["--preset", "tiny", "--cluster", "h100:1", "--seq", "64", "--global-batch", "1"]
    done = CliRunner().invoke(app, ["simulate", *words, "--policy", str(policy)])
    assert done.exit_code == 0, done.output
    assert "layers.*.attn.k_norm" in done.stderr
    for match in ("layers.*.attn.qkv_linear.kv_up", "layers.*.mlp.gate", "layers.*.attn.sinks"):
        with pytest.raises(ValueError, match="matches no region"):
            check_policy(Policy([Rule(match, "recompute")]), layers)
