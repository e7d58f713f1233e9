"""Policies, by hand or of a plan, in a simulated step."""

import json
from dataclasses import replace

import pytest
import torch
from support.search import search_little
from typer.testing import CliRunner

import pagestash as ps
from pagestash.cli import app
from pagestash.models import Decoder, preset
from pagestash.policy import Policy, Rule
from pagestash.simulation.cluster.cluster import load_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.build import step_costs
from pagestash.simulation.model.homes import PolicyHomes
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.regions import check_policy
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
