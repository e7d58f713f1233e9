"""A rank that raises brings the others down: when the process group's timeout is over, or when the rank has died.

Nothing here is timed. Collectives that must succeed have the patience of hours; the timeout is made short only for
one that cannot, as the other rank is known not to come.
"""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.processes import server
from torch.distributed.distributed_c10d import _set_pg_timeout

from pagestash.moe import AllGather, AllToAll, MoE, MoEConfig, overlap

PATIENT, SHORT = timedelta(hours=1), timedelta(seconds=0.3)
HANGS = 240
"""Seconds after which a process counts as hung: far below the patience, far above what it needs."""
# Both passes among them, and a pair of them.
CASES = [("gather", "forward"), ("padded", "backward"), ("exact", "forward"), ("padded", "pair")]


def make(kind, group):
    config = MoEConfig(width=16, expert_width=16, experts=4, top_k=2)
    dispatches = {
        "gather": lambda: AllGather(config, group, max_tokens=6),
        "padded": lambda: AllToAll(config, group, max_tokens=6),
        "exact": lambda: AllToAll(config, group, padded=False),
    }
    return MoE(config, dispatch=dispatches[kind]())


def step(moe, rank, where, before_the_last=lambda: None):
    """A step in which rank 1 raises, before the layer or before backward; the other calls back just there."""
    if where == "pair":
        y, _ = moe(torch.randn(6, 16))
        overlap(partial(step, moe, rank, "forward", before_the_last), y.sum().backward)
        return
    if where == "backward":
        y, _ = moe(torch.randn(6, 16))
    if rank == 1:
        raise ValueError(f"a bad batch on rank 1, before {where}")
    before_the_last()
    if where == "forward":
        y, _ = moe(torch.randn(6, 16))
    y.sum().backward()


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=PATIENT
    )
    found = {}
    for kind, where in CASES:
        group = dist.new_group([0, 1], timeout=PATIENT)
        try:
            step(make(kind, group), rank, where, lambda group=group: _set_pg_timeout(SHORT, group))
        except (RuntimeError, ValueError) as error:
            found[kind, where] = str(error)
        dist.barrier()  # rank 1 stays alive, and says nothing, until rank 0 has given up
    torch.save(found, f"{folder}/{rank}.pt")
    # At last rank 1 dies of its error, as a training script would.
    moe = make("gather", dist.new_group([0, 1], timeout=PATIENT))
    try:
        step(moe, rank, "backward")
    except RuntimeError as error:
        torch.save(str(error), f"{folder}/dead.pt")
        raise


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The processes' exit codes, and where they wrote."""
    folder = tmp_path_factory.mktemp("failures")
    with server() as context:
        # Not `start_ranks`: that one ends the others itself when one has raised.
        processes = [context.Process(target=work, args=(rank, str(folder))) for rank in range(2)]
        for process in processes:
            process.start()
    try:
        for process in processes:
            process.join(HANGS)
        return [process.exitcode for process in processes], folder
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize(("kind", "where"), CASES)
def test_a_rank_that_waits_in_vain_says_so_when_the_timeout_is_over(ended, kind, where):
    waiting, raising = (torch.load(ended[1] / f"{rank}.pt") for rank in range(2))
    assert raising[kind, where] == f"a bad batch on rank 1, before {'forward' if where == 'pair' else where}"
    message = waiting[kind, where]
    assert "rank 0 of 2" in message
    assert "expert-parallel layer failed" in message
    assert "another rank has raised" in message
    assert "imed out" in message or "timeout" in message  # the backend's own words


def test_a_rank_that_dies_takes_the_others_with_it_and_no_timeout_is_waited_for(ended):
    codes, folder = ended
    assert codes == [1, 1]
    message = torch.load(folder / "dead.pt")
    assert "another rank has raised" in message
    assert "imed out" not in message
