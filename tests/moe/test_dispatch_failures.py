"""A rank that raises brings the others down, within the process group's timeout and with a message."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pagestash.moe import AllGather, AllToAll, MoE, MoEConfig

TIMEOUT = 2.5
# Each waits for a timeout: one for every dispatch, both passes among them.
CASES = [("gather", "forward"), ("padded", "backward"), ("exact", "forward")]


def make(kind, group):
    config = MoEConfig(width=16, expert_width=16, experts=4, top_k=2)
    dispatches = {
        "gather": lambda: AllGather(config, group, max_tokens=6),
        "padded": lambda: AllToAll(config, group, max_tokens=6),
        "exact": lambda: AllToAll(config, group, padded=False),
    }
    return MoE(config, dispatch=dispatches[kind]())


def step(moe, rank, where):
    """A step in which rank 1 raises, before the layer or before backward."""
    if rank == 1 and where == "forward":
        raise ValueError("a bad batch on rank 1")
    y, _ = moe(torch.randn(6, 16))
    if rank == 1 and where == "backward":
        raise ValueError("a bad loss on rank 1")
    y.sum().backward()


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for kind, where in CASES:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT))
        moe = make(kind, group)
        dist.barrier()  # with the default group's patience: what is timed begins here
        start = time.monotonic()
        try:
            step(moe, rank, where)
        except (RuntimeError, ValueError) as error:
            found[kind, where] = (str(error), time.monotonic() - start)
        dist.barrier()  # rank 1 stays alive, and says nothing, until rank 0 has given up
    torch.save(found, f"{folder}/{rank}.pt")
    # At last rank 1 dies of its error, as a training script would.
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    moe = make("gather", group)
    dist.barrier()
    try:
        step(moe, rank, "backward")
    except RuntimeError as error:
        torch.save(str(error), f"{folder}/dead.pt")
        raise


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The processes' exit codes, and where they wrote."""
    folder = tmp_path_factory.mktemp("failures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        mp.set_forkserver_preload(["torch", "pagestash.moe", "pytest"])
        # Not mp.spawn: that one ends the others itself when one has raised.
        make_process = mp.get_context("forkserver").Process
        processes = [make_process(target=work, args=(rank, str(folder))) for rank in range(2)]
        for process in processes:
            process.start()
    try:
        for process in processes:
            process.join(90)
        return [process.exitcode for process in processes], folder
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize(("kind", "where"), CASES)
def test_a_rank_that_waits_in_vain_says_so_when_the_timeout_is_over(ended, kind, where):
    waiting, raising = (torch.load(ended[1] / f"{rank}.pt") for rank in range(2))
    assert "on rank 1" in raising[kind, where][0]
    message, seconds = waiting[kind, where]
    assert "rank 0 of 2" in message
    assert "expert-parallel layer failed" in message
    assert "another rank has raised" in message
    assert TIMEOUT * 0.9 < seconds < TIMEOUT + 5


def test_a_rank_that_dies_takes_the_others_with_it_long_before_the_timeout(ended):
    codes, folder = ended
    assert codes == [1, 1]
    assert "another rank has raised" in torch.load(folder / "dead.pt")
