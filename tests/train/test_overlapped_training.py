"""`overlap=true` trains what the same run without it does, to the last bit."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "pipeline"))
sys.path.insert(0, str(Path(__file__).parent))
from gloo import spawn
from small import runs
from test_pipelined import NEW_TORCH, check_equal, four_layers

from pagestash.train import prepare

PIPED = ["1F1B", "Interleaved1F1B", *(["DualPipeV"] if NEW_TORCH else [])]


def both(given, folder, name):
    """Without overlap, and with it."""
    return [
        ({**given, "overlap": on}, folder / f"{name}{' overlapped' if on else ''}", False)
        for on in (False, True)
    ]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    given = four_layers(folder, clip=0.0, policy=str(folder / "stash.toml"), dispatch="all_to_all")
    jobs = both({**given, "shard": False}, folder, "whole")
    for name in PIPED:
        jobs += both({**given, "pipeline": 2, "expert_parallel": 1, "schedule": name}, folder, name)
    spawn(runs, 2, jobs)
    return folder


@pytest.mark.parametrize("name", ["whole", *PIPED])
def test_a_run_on_two_ranks(two_ranks, name):
    check_equal(two_ranks / name, two_ranks / f"{name} overlapped")


@pytest.mark.slow
def test_stages_that_are_sharded(tmp_path):
    """Two ranks a stage share its experts, and FSDP2 what is common to them."""
    given = four_layers(
        tmp_path, clip=0.0, dispatch="all_to_all", pipeline=2, expert_parallel=2, schedule="1F1B"
    )
    spawn(runs, 4, both(given, tmp_path, "sharded"))
    check_equal(tmp_path / "sharded", tmp_path / "sharded overlapped")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"microbatches": 1}, "a step needs two microbatches or more, and has 1"),
        (
            {"pipeline": 2, "schedule": "GPipe"},
            "has no pairs of a forward and a backward; expected one of 1F1B",
        ),
        ({"shard": True}, "shard=False"),
    ],
)
def test_what_cannot_be_overlapped_is_refused(tmp_path, monkeypatch, changes, told):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=told):
        prepare(four_layers(tmp_path) | {"overlap": True, "shard": False} | changes, tmp_path / "out")
