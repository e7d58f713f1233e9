"""Training with a large pool and with one that is too small once: both must end the same."""

import random

import numpy as np
import torch
from torch import nn

import pagestash as ps

SMALL, LARGE = 256 * 20, "4MiB"
ROWS = (4, 64, 8, 8)  # the second needs more pages than the small pool has


def data(rows=ROWS):
    return [torch.randn(n, 32, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(rows)]


def net():
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))


def attach(model, device, rules=None):
    rules = rules or [ps.Rule("*", "stash", min_bytes=0)]
    pool = ps.PoolConfig(page=256, device=device, headroom=1.0)
    return ps.Keeper(ps.Policy(rules, pool), backend="torch").attach(model)


def ends(make, rows=ROWS, small=SMALL):
    """All state after all batches, with a large pool and a small one; `make(device)` gives a step and its state."""
    results = []
    for device in (LARGE, small):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        step, state = make(device)
        losses = [step(x) for x in data(rows)]
        assert (step.reruns > 0) == (device == small)
        results.append([*losses, *(t.detach().clone() for t in state()), torch.get_rng_state()])
    return results
