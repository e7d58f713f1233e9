"""`torchrun … -m pagestash train`: several ranks train what one process does, and share its checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiers import slow

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
sys.path.insert(0, str(Path(__file__).parent))
from gloo import spawn
from small import MODEL, run, runs, runs_short_of_pages, settings, words

from pagestash.train import read_metrics
from pagestash.train.checkpoint import latest

STEPS = 3


HELD_BACK = Path(__file__).with_name("held_back.py")


def torchrun(ranks, given, out, *more, program=("-m", "pagestash")):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launch, *program, "train", *words(given, out), *more],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def few(folder, batch, **changes):
    # The balance loss is of each rank's own tokens; without it, ranks differ from one process by rounding.
    return settings(folder, batch=batch, steps=STEPS, **changes) | {"model": {**MODEL, "balance_loss": 0.0}}


def close(first, second):
    """Metrics and weights of two runs, up to the order of sums."""
    for a, b in zip(read_metrics(first), read_metrics(second), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["tokens"] == b["tokens"]
    a, b = (load_file(latest(out) / "model.safetensors") for out in (first, second))
    assert a.keys() == b.keys()
    for name in a:
        # AdamW's first updates have the size of the rate whatever the gradient's: rounding shows where it is ~0.
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-3, msg=name)
        assert (a[name] - b[name]).abs().mean() < 1e-5, name


LAYOUTS = [
    pytest.param(2, {"expert_parallel": 1}, id="fsdp", marks=pytest.mark.slow),
    pytest.param(2, {"dispatch": "all_gather"}, id="all_gather"),
    pytest.param(2, {"dispatch": "all_to_all"}, id="all_to_all", marks=pytest.mark.slow),
    pytest.param(2, {"dispatch": "all_to_all_exact"}, id="exact", marks=pytest.mark.slow),
    pytest.param(4, {"expert_parallel": 2}, id="both", marks=pytest.mark.slow),
    pytest.param(2, {"shard": False, "expert_parallel": 1}, id="replicated", marks=pytest.mark.slow),
    pytest.param(4, {"shard": False, "expert_parallel": 2}, id="replicated groups"),
]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_ranks_train_what_one_process_does(tmp_path, ranks, layout):
    whole = few(tmp_path, 4)
    run(whole, tmp_path / "whole")
    parts = few(tmp_path, 4 // ranks, policy=str(tmp_path / "stash.toml"), **layout)
    if layout == {"dispatch": "all_gather"} or "shard" in layout:
        spawn(
            runs, ranks, [(parts, tmp_path / "ranks", False)]
        )  # quicker than a launch, which the others test
    elif sys.platform != "linux":
        torchrun(ranks, parts, tmp_path / "ranks")
    else:
        torchrun(ranks, parts, tmp_path / "ranks", program=[HELD_BACK])
        threads = [(tmp_path / "ranks" / f"threads{rank}.txt").read_text().split() for rank in range(ranks)]
        for seen, left in threads:
            assert int(seen) >= 2
            assert int(left) == 0  # one that is at work when Python ends would abort the process
    close(tmp_path / "whole", tmp_path / "ranks")
    stashed = [line["saved_bytes"]["stash"] for line in read_metrics(tmp_path / "ranks")]
    assert all(size > 0 for size in stashed)
    if layout == {"expert_parallel": 1}:
        # The first projection of 32 tokens of two choices, with their weights, order and places: none of the
        # experts' parameters, which FSDP2 gathered just before and which are not those of the module that runs.
        assert set(stashed[1:]) == {32 * 2 * (2 * MODEL["expert_width"] + 3) * 4}


@pytest.mark.parametrize("shard", [True, *slow(False)])
def test_an_overflow_on_one_rank_is_skipped_and_rerun_by_all(tmp_path, shard):
    """Rank 0 writes the metrics, and has pages to spare."""
    given = few(tmp_path, 2, policy=str(tmp_path / "stash.toml"), shard=shard)
    for name, short in (("enough", None), ("short", 1)):
        spawn(runs_short_of_pages, 2, given, tmp_path / name, short)
    enough, short = (read_metrics(tmp_path / name) for name in ("enough", "short"))
    assert [line["rerun"] for line in enough] == [0, 0, 0]
    assert [line["rerun"] for line in short] == [1, 0, 0]
    assert [(line["loss"], line["grad_norm"]) for line in enough] == [
        (line["loss"], line["grad_norm"]) for line in short
    ]
    a, b = (load_file(latest(tmp_path / name) / "model.safetensors") for name in ("enough", "short"))
    assert all(torch.equal(a[name], b[name]) for name in a)


AGAIN = """
[pool]
page = 1024
[[rule]]
match = "layers.*.moe.expert_fc1"
home = "stash"
min_bytes = 256
[[rule]]
match = "layers.*"
home = "recompute"
"""


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all", "all_to_all_exact"])
def test_ranks_run_layers_again_to_the_same_bits(tmp_path, dispatch):
    """Rows that arrived wait in pages; what is left of a layer is its input."""
    (tmp_path / "again.toml").write_text(AGAIN)
    given = few(tmp_path, 2, dispatch=dispatch)
    torchrun(2, given, tmp_path / "plain")
    torchrun(2, {**given, "policy": str(tmp_path / "again.toml")}, tmp_path / "again")
    plain, again = (read_metrics(tmp_path / name) for name in ("plain", "again"))
    assert [(line["loss"], line["grad_norm"]) for line in plain] == [
        (line["loss"], line["grad_norm"]) for line in again
    ]
    assert all(line["saved_bytes"]["stash"] > 0 for line in again)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS[:2])
def test_a_checkpoint_fits_any_number_of_ranks(tmp_path, ranks, layout):
    whole = few(tmp_path, 4)
    run({**whole, "steps": STEPS + 2}, tmp_path / "whole")
    run(whole, tmp_path / "run")
    parts = few(tmp_path, 4 // ranks, **layout) | {"steps": STEPS + 1}
    torchrun(ranks, parts, tmp_path / "run", "--resume")
    run({"steps": STEPS + 2, "batch": 4}, tmp_path / "run", resume=True)
    close(tmp_path / "whole", tmp_path / "run")


def test_a_single_process_takes_no_notice_of_its_callers_group(tmp_path):
    given = few(tmp_path, 4)
    alone = run(given, tmp_path / "alone")
    spawn(runs, 1, [(given, tmp_path / "grouped", False)])
    grouped = read_metrics(tmp_path / "grouped")
    assert [(a["loss"], a["grad_norm"]) for a in alone] == [(b["loss"], b["grad_norm"]) for b in grouped]
