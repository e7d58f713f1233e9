"""The trainer on a GPU: graphed steps, with and without the stash, to the same bits."""

import os

import pytest
import torch.distributed as dist
from support import same

# Read once, at the first product on a GPU, which may be another file's.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytest.importorskip("safetensors")
from safetensors.torch import load_file

from pagestash.train import prepare, read_metrics, train
from pagestash.train.checkpoint import latest

pytestmark = pytest.mark.gpu
STASH = """
[pool]
page = "16KiB"
{pool}
[[rule]]
match = "layers.*.moe.experts"
home = "stash"
min_bytes = 4096
"""


def run(out, resume=False, **changes):
    """Five steps of the tiny preset (the third is captured), and their metrics."""
    text = out.parent / "corpus.txt"
    if not text.exists():
        text.write_text("".join(f"{n} bottles of beer on the wall, {n * 7 % 13} left;\n" for n in range(500)))
    given = {"steps": 5, "corpus": (str(text),), "checkpoint_every": 0, **changes}
    train(prepare(given, out, resume=resume))
    return read_metrics(out)


def policy(folder, pool=""):
    path = folder / "stash.toml"
    path.write_text(STASH.format(pool=pool))
    return str(path)


def numbers(lines):
    return [(line["loss"], line["grad_norm"]) for line in lines]


def same_weights(first, second):
    return same(*(load_file(latest(out) / "model.safetensors") for out in (first, second)))


def test_two_runs_have_the_same_bits(tmp_path):
    assert numbers(run(tmp_path / "a")) == numbers(run(tmp_path / "b"))
    assert same_weights(tmp_path / "a", tmp_path / "b")


def test_graphed_steps_with_the_stash_have_the_losses_of_those_without(tmp_path):
    plain = run(tmp_path / "plain")
    stashed = run(tmp_path / "stash", policy=policy(tmp_path))
    assert numbers(plain) == numbers(stashed)
    assert same_weights(tmp_path / "plain", tmp_path / "stash")
    assert all(line["saved_bytes"]["stash"] > 0 for line in stashed)
    assert plain[-1]["loss"] < plain[0]["loss"]


def test_a_graph_trains_as_eager_steps_do(tmp_path):
    eager = run(tmp_path / "eager", policy=policy(tmp_path), graph=False)
    graphed = run(tmp_path / "graphed", policy=policy(tmp_path))
    # Rates reach a graph as float32, and eager steps as Python's floats.
    for a, b in zip(eager, graphed, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


@pytest.fixture
def nccl(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_a_rank_with_nccl_trains_in_a_graph_as_it_does_eagerly(tmp_path, dispatch):
    """One rank, with the collectives that several would run: dispatch, gradients, norm, loss and flag."""
    given = {"policy": policy(tmp_path), "dispatch": dispatch, "shard": False}
    eager = run(tmp_path / "eager", **given, graph=False)
    graphed = run(tmp_path / "graphed", **given)
    short = run(tmp_path / "short", **given | {"policy": policy(tmp_path, 'device = "16KiB"')})
    # Rates reach a graph as float32, and eager steps as Python's floats.
    for a, b in zip(eager, graphed, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
    assert numbers(short) == numbers(graphed)
    assert sum(line["rerun"] for line in short) >= 1
    assert same_weights(tmp_path / "graphed", tmp_path / "short")


def test_a_short_pool_is_told_and_changes_no_bit(tmp_path):
    plain = run(tmp_path / "plain")
    short = run(tmp_path / "short", policy=policy(tmp_path, 'device = "16KiB"'))
    assert numbers(plain) == numbers(short)
    assert short[0]["overflow"]
    assert sum(line["rerun"] for line in short) >= 1


def test_a_resumed_run_has_the_same_bits(tmp_path):
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", steps=3)
    parts = run(tmp_path / "parts", resume=True, steps=5)
    assert numbers(whole) == numbers(parts)
    assert same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("preset", ["qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b"])
def test_a_layer_of_a_published_width_trains(tmp_path, preset):
    few = {"experts": 16} | ({"groups": 4, "group_limit": 2} if preset == "deepseek-v3" else {})
    # The experts of one layer alone would be gigabytes of checkpoint.
    if preset == "deepseek-v3":
        few |= {"expert_width": 512}
    given = {"preset": preset, "layers": 1, "model": few, "sequence": 512, "lr": 1e-4, "warmup": 1}
    lines = run(tmp_path / "run", **given, steps=4, policy=policy(tmp_path))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(line["saved_bytes"]["stash"] > 0 for line in lines)
