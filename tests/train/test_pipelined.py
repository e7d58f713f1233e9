"""A pipeline trains what one process does: the same losses, the same checkpoints, whatever the schedule."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
sys.path.insert(0, str(Path(__file__).parent))
from gloo import spawn
from small import MODEL, run, runs, settings
from test_ranks import close, torchrun

from pagestash.schedules.plan import SCHEDULES, SPLIT_BACKWARD, plans
from pagestash.train import prepare, read_metrics
from pagestash.train.checkpoint import latest
from pagestash.train.prepare import splits_backward

STEPS = 2


def four_layers(folder, **changes):
    """Four layers of which the first is dense: six places for up to four stages."""
    return settings(folder, layers=4, batch=4, microbatches=4, steps=STEPS, **changes)


def compare(first, second):
    """Losses and weights of two runs, to the last bit; the norm is a sum over ranks."""
    for a, b in zip(read_metrics(first), read_metrics(second), strict=True):
        assert a["loss"] == b["loss"]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-6)
        assert a.keys() == b.keys()
        assert all(a[key] == b[key] for key in ("step", "lr", "tokens", "overflow", "rerun"))
    a, b = (load_file(latest(out) / "model.safetensors") for out in (first, second))
    assert a.keys() == b.keys()
    return a, b


def alone(given, out, **how):
    """A single process, on one thread as each rank is: more would add in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run(given, out, **how)
    finally:
        torch.set_num_threads(threads)


def piped_jobs(folder, given, names):
    policy = str(folder / "stash.toml")
    how = {"pipeline": 2, "expert_parallel": 1, "policy": policy}
    return [({**given, **how, "schedule": name}, folder / name, False) for name in names]


CLIP = 0.1
"""Well below the norm of a first gradient: every step is clipped."""
NEW_TORCH = splits_backward()
LAST = "DualPipeV" if NEW_TORCH else "LoopedBFS"
FEW = ("1F1B", "InterleavedZeroBubble" if NEW_TORCH else "Interleaved1F1B", LAST)
"""The schedules tried by default; those that split backward where this torch can."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Schedules on two ranks, with a stash, beside a single process; one of them with clipping."""
    folder = tmp_path_factory.mktemp("two_ranks")
    given, clipped = four_layers(folder, clip=0.0), four_layers(folder, clip=CLIP)
    longer = {**given, "steps": STEPS + 1}
    alone(given, folder / "whole")
    alone(clipped, folder / "whole, clipped")
    alone(longer, folder / "longer")
    # One that a single process began, and after these one that a pipeline did.
    alone(given, folder / "begun alone")
    again = folder / "again.toml"
    again.write_text("".join(f'[[rule]]\nmatch = "layers.{n}"\nhome = "recompute"\n' for n in (1, 3)))
    jobs = [
        *piped_jobs(folder, given, FEW),
        ({**given, "pipeline": 2, "policy": str(again)}, folder / "recomputed", False),
        ({**clipped, "pipeline": 2, "schedule": "1F1B"}, folder / "clipped", False),
        ({**longer, "pipeline": 2, "schedule": "1F1B"}, folder / "begun alone", True),
    ]
    spawn(runs, 2, jobs)
    alone({"steps": STEPS + 1, "pipeline": 1, "policy": "none"}, folder / LAST, resume=True)
    return folder


def check_equal(first, second):
    a, b = compare(first, second)
    for key in a:
        assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("name", [name for name in FEW if name != LAST])
def test_a_schedule_trains_what_one_process_does(two_ranks, name):
    check_equal(two_ranks / "whole", two_ranks / name)
    assert all(line["saved_bytes"]["stash"] > 0 for line in read_metrics(two_ranks / name)[1:])


def test_layers_of_single_stages_may_be_recomputed(two_ranks):
    """Each rule matches a layer that one of the ranks has."""
    check_equal(two_ranks / "whole", two_ranks / "recomputed")


def test_clipping_rounds_by_a_norm_that_is_summed_over_ranks(two_ranks):
    """The first loss is the same to the last bit; the norm, and what follows from it, up to the order of sums."""
    whole, parts = (read_metrics(two_ranks / name) for name in ("whole, clipped", "clipped"))
    assert whole[0]["loss"] == parts[0]["loss"]
    assert all(line["grad_norm"] > 2 * CLIP for line in whole)
    assert whole[0]["grad_norm"] == pytest.approx(parts[0]["grad_norm"], rel=1e-6)
    close(two_ranks / "whole, clipped", two_ranks / "clipped")


@pytest.mark.slow
def test_every_other_schedule_does(tmp_path):
    given = four_layers(tmp_path, clip=0.0)
    others = [name for name in SCHEDULES if name not in FEW and (NEW_TORCH or name not in SPLIT_BACKWARD)]
    spawn(runs, 2, piped_jobs(tmp_path, given, others))
    alone(given, tmp_path / "whole")
    for name in others:
        if name == "LoopedBFS":  # adds the microbatches' gradients from the last to the first
            close(tmp_path / "whole", tmp_path / name)
        else:
            check_equal(tmp_path / "whole", tmp_path / name)


@pytest.mark.parametrize("name", [LAST, "begun alone"])
def test_a_checkpoint_of_one_layout_goes_on_in_another(two_ranks, name):
    if name == "LoopedBFS":  # adds the microbatches' gradients from the last to the first
        close(two_ranks / "longer", two_ranks / name)
    else:
        check_equal(two_ranks / "longer", two_ranks / name)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """Two ranks a stage: sharing the experts, and sharing only data."""
    folder = tmp_path_factory.mktemp("four_ranks")
    model = {"model": {**MODEL, "balance_loss": 0.0}}  # of each rank's own tokens: differs with their number
    parts = four_layers(folder, pipeline=2, policy=str(folder / "stash.toml")) | model
    jobs = [
        ({**parts, "schedule": LAST, "expert_parallel": 2}, folder / "experts", False),
        ({**parts, "schedule": "1F1B", "expert_parallel": 1}, folder / "data", False),
    ]
    spawn(runs, 4, jobs)
    alone(four_layers(folder) | model | {"batch": 8, "microbatches": 4}, folder / "whole")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["experts", "data"])
def test_experts_and_data_are_shared_beside_the_pipeline(four_ranks, layout):
    close(four_ranks / "whole", four_ranks / layout)


@pytest.mark.slow
def test_the_documented_command(tmp_path):
    given = four_layers(tmp_path)
    given = {key: value for key, value in given.items() if key != "microbatches"}
    torchrun(2, given, tmp_path / "piped", "--pp", "2", "--schedule", LAST, "--ep", "1")
    run({**given, "microbatches": 4}, tmp_path / "whole")
    close(tmp_path / "whole", tmp_path / "piped")


def test_microbatches_are_a_step(tmp_path):
    plain = settings(tmp_path, batch=4) | {"model": {**MODEL, "balance_loss": 0.0}}
    run(plain, tmp_path / "plain")
    run({**plain, "microbatches": 2}, tmp_path / "parts")
    close(tmp_path / "plain", tmp_path / "parts")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pipeline": 3}, "pipeline=3 does not divide the 2 ranks"),
        ({"pipeline": 2, "schedule": "Nonsense"}, "unknown schedule 'Nonsense'"),
        (
            {"pipeline": 2, "schedule": "DualPipeV", "batch": 2, "microbatches": 2},
            "as many microbatches as stages" if NEW_TORCH else "splits backward",
        ),
        ({"pipeline": 2, "schedule": "LoopedBFS", "chunks": 5}, "10 stages for 6 layers"),
        ({"pipeline": 2, "microbatches": 3}, "microbatches=3 do not divide batch=4"),
        ({"pipeline": 2, "expert_parallel": 2}, "expert_parallel=2 does not divide the 1 ranks of a stage"),
        ({"pipeline": 2, "chunks": 2}, "1F1B has 1 stage per rank, not 2"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, monkeypatch, changes, told):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=told):
        prepare(four_layers(tmp_path) | changes, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_splits_backward_is_refused_where_torch_cannot(tmp_path, monkeypatch, name):
    splits = plans(name, ranks=2, microbatches=4)[0].splits_backward
    assert splits == (name in SPLIT_BACKWARD)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.__version__", "2.11.0+cu130")
    given = four_layers(tmp_path) | {"pipeline": 2, "schedule": name}
    if splits:
        with pytest.raises(ValueError, match=r"needs torch 2\.13 or later .* this is torch 2\.11\.0"):
            prepare(given, tmp_path / "out")
    else:
        prepare(given, tmp_path / "out")
