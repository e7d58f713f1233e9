"""Two pipeline stages under 1F1B, with what they save offloaded by the schedule's own plan.

    python examples/pipeline.py                               # starts its ranks itself
    torchrun --nproc-per-node 2 examples/pipeline.py          # the same

Rank 0 holds more microbatches than rank 1, whose backwards come at once: it moves bytes, rank 1 does not need to.
"""

import argparse
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pagestash as ps


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def work(microbatches: int, rows: int, width: int) -> None:
    """What each rank does: one stage of two layers, two steps."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    module = nn.Sequential(Layer(width), Layer(width))
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=nn.functional.mse_loss)

    keeper = ps.Keeper(ps.Policy([ps.Rule("*", "offload", min_bytes=0)])).attach(module)
    keeper.follow(schedule)  # it knows ahead which microbatch's backward comes next

    x, target = (torch.randn(microbatches * rows, width) for _ in range(2))
    for _ in range(2):
        module.zero_grad()
        with keeper.step():
            if rank == 0:
                schedule.step(x)
            elif rank == world - 1:
                schedule.step(target=target)
            else:
                schedule.step()
    moved = keeper.stats().homes["offload"].peak
    for number in range(world):  # one after the other, so that lines stay whole
        if number == rank:
            print(f"rank {rank} of {world}: {moved:,} bytes waited on the host", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    asked = parser.parse_args()
    if "RANK" in os.environ:
        work(asked.microbatches, asked.rows, asked.width)
        return
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={asked.ranks}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    raise SystemExit(subprocess.run([sys.executable, *launch, *sys.argv], env=environment).returncode)


if __name__ == "__main__":
    main()
