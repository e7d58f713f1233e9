"""Offload as much as hides behind compute: measure a step, ask what fits, and train with that.

    python examples/offload_by_profile.py

On a CPU there is no link; the profile assumes 50 GB/s each way, and copies go to another place in the same memory.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

import pagestash as ps
from pagestash.models import Decoder, preset


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    asked = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder(preset(asked.preset, layers=asked.layers))
    model.initialise(0)
    model.to(device)
    tokens = torch.randint(0, 256, (2, asked.sequence + 1), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    batch = tokens[:, :-1], tokens[:, 1:]

    # 1. What does a step save, and how long does each region run?
    found = ps.profile(model, batch)
    print(f"saved for backward: {found.total_bytes:,} bytes")

    # 2. Of what attention saves, how much can the link move behind compute?
    rule = {
        "match": "layers.*.attn.core_attn",
        "home": "offload",
        "min_bytes": "4KiB",
        "prefetch_bytes": "256KiB",
    }
    everything = ps.Policy([ps.Rule(**rule)])
    verdict = found.fits(everything)
    print(
        f"of {verdict.moved_bytes:,} bytes of attention that would move hides a fraction of {verdict.fraction}"
    )

    # 3. Train with exactly that fraction, after as many steps without.
    def train(step: Callable[[], AbstractContextManager[None]]) -> list[torch.Tensor]:
        for _ in range(asked.steps):  # the first step with a keeper is measured, the others go by its order
            model.zero_grad()
            with step():
                loss = sum(model(*batch))
                loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    before = train(nullcontext)
    keeper = ps.Keeper([ps.Rule(**rule, fraction=max(verdict.fraction, 0.01))]).attach(model)
    after = train(keeper.step)
    print(f"loss and gradients equal to the last bit: {all(map(torch.equal, before, after))}")
    print(f"waited on the host: {keeper.stats().homes['offload'].peak:,} bytes")


if __name__ == "__main__":
    main()
