"""torchtitan's own `train.main()` on a CPU: what it assumes of a GPU is replaced, here alone.

    python train.py runs.json RANKS        in a folder that `small.assets` has filled

`runs.json` has the arguments of each run, by the name of what it leaves: NAME.0.json of rank 0 with losses, norms
of gradients and bytes in homes, NAME.0.pt with weights. Each run is in forked processes: to import torchtitan takes
longer than to run it. `docs/torchtitan.md` lists the replacements.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch._utils
import torch.distributed as dist
from torch.multiprocessing import start_processes

torch.set_num_threads(1)
torch._utils._get_available_device_type = lambda: (
    "cpu"
)  # torchtitan takes "cuda" where there is no accelerator


class _Device:
    total_memory = 1 << 34


torch.cpu.get_device_name = lambda *_: "cpu"
torch.cpu.get_device_properties = lambda *_: _Device
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
torch.cpu.memory_stats = lambda *_: {}
dist.Backend.default_device_backend_map.setdefault("cpu", "gloo")
_barrier = dist.barrier
dist.barrier = lambda *args, device_ids=None, **keywords: _barrier(*args, **keywords)

from torch.distributed.fsdp import FSDPModule  # noqa: E402

_divide = FSDPModule.set_gradient_divide_factor


def _sum(self, factor):  # gloo has no PREMUL_SUM
    self.set_force_sum_reduction_for_comms(True)
    _divide(self, factor)


FSDPModule.set_gradient_divide_factor = _sum


def run(rank, ranks, name, arguments):
    """One rank's training, in a process of its own."""
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.train import main
    from torchtitan.trainer import Trainer

    steps = []

    def log(self, step, average, most, norm, extra_metrics=None):
        steps.append((float(average).hex(), float(norm).hex()))

    MetricsProcessor.log = log
    close = Trainer.close

    def closing(self):
        weights = {
            f"{number}.{name}": (value.to_local() if hasattr(value, "to_local") else value).detach().clone()
            for number, part in enumerate(self.model_parts)
            for name, value in part.state_dict().items()
        }
        keeper = getattr(self, "keeper", None)
        homes = {} if keeper is None else {home: held.peak for home, held in keeper.stats().homes.items()}
        torch.save(weights, f"{name}.{rank}.pt")
        Path(f"{name}.{rank}.json").write_text(json.dumps({"steps": steps, "homes": homes}))
        close(self)

    Trainer.close = closing
    connect = dist.init_process_group

    def init_process_group(*args, init_method=None, **keywords):
        place = f"file://{Path(name).absolute()}.store"
        return connect(*args, init_method=place, rank=rank, world_size=ranks, **keywords)

    torch.distributed.init_process_group = init_process_group
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": 0,
    }
    os.environ |= {key: str(value) for key, value in place.items()}
    sys.argv[1:] = arguments
    main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import small  # noqa: F401
    import torchtitan.trainer

    import pagestash.integrations.torchtitan  # noqa: F401

    torchtitan.trainer.time.sleep = lambda *_: None
    ranks = int(sys.argv[2])
    for name, arguments in json.loads(Path(sys.argv[1]).read_text()).items():
        start_processes(run, (ranks, name, arguments), nprocs=ranks, start_method="fork")
