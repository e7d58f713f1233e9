"""torchtitan's own `train.main()` on a CPU: what it assumes of a GPU is replaced, here alone.

    torchrun --nproc-per-node 2 train.py runs.json        in a folder that `small.assets` has filled

`runs.json` has the arguments of each run, by the name of what it leaves: NAME.0.json of rank 0 with losses, norms
of gradients and bytes in homes, NAME.0.pt with weights. The runs follow each other, because importing torchtitan
takes longer than one of them. `docs/torchtitan.md` lists the replacements.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch._utils
import torch.distributed as dist

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


def main(runs):
    import torchtitan.trainer
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.train import main as train
    from torchtitan.trainer import Trainer

    steps, names = [], list(runs)

    def log(self, step, average, most, norm, extra_metrics=None):
        steps.append((float(average).hex(), float(norm).hex()))

    MetricsProcessor.log = log
    torchtitan.trainer.time.sleep = lambda *_: None
    close = Trainer.close

    def closing(self):
        if not getattr(self, "closed", False):
            self.closed = True
            weights = {
                f"{number}.{name}": (value.to_local() if hasattr(value, "to_local") else value)
                .detach()
                .clone()
                for number, part in enumerate(self.model_parts)
                for name, value in part.state_dict().items()
            }
            keeper = getattr(self, "keeper", None)
            homes = {} if keeper is None else {h: held.peak for h, held in keeper.stats().homes.items()}
            rank = os.environ["RANK"]
            torch.save(weights, f"{names[0]}.{rank}.pt")
            Path(f"{names[0]}.{rank}.json").write_text(json.dumps({"steps": steps, "homes": homes}))
        close(self)

    Trainer.close = closing
    connect = dist.init_process_group

    def init_process_group(*args, init_method=None, **keywords):
        """Each run meets at a file of its own."""
        place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        return connect(*args, init_method=f"file://{Path(names[0]).absolute()}.store", **keywords, **place)

    torch.distributed.init_process_group = init_process_group
    while names:
        sys.argv[1:] = runs[names[0]]
        train()
        steps.clear()
        del names[0]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(json.loads(Path(sys.argv[1]).read_text()))
