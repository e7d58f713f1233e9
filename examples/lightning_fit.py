"""Train with Lightning's Trainer, under a policy.

    python examples/lightning_fit.py

Trains twice from the same weights, the trainer alone and with `Stash`, and compares losses, weights and bytes.
"""

import argparse

import lightning
import torch

import pagestash as ps
from pagestash.integrations.lightning import Stash
from pagestash.models import Decoder, preset


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Decoder(preset("tiny"))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss, balance = self.net(batch[:, :-1], batch[:, 1:])
        self.losses.append(loss.item())
        return loss + balance

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(callbacks: list[lightning.Callback], *, steps: int, sequence: int) -> Model:
    lightning.seed_everything(0, verbose=False)
    model = Model()
    data = torch.randint(0, 256, (2 * steps, 2, sequence + 1))
    trainer = lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=2,
        accelerator="auto",
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None))
    return model


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    shape = vars(parser.parse_args(arguments))
    rules = [
        ps.Rule("net.layers.*.moe.experts", "stash", min_bytes=0),
        ps.Rule("net.layers.*.attn", "offload", min_bytes=0, prefetch_bytes=0),
        ps.Rule("net.layers.*.*_norm", "recompute"),
    ]
    stash = Stash(ps.Policy(rules, ps.PoolConfig(page="4KiB")))
    plain, kept = train([], **shape), train([stash], **shape)
    print("losses:", *(f"{loss:.4f}" for loss in kept.losses))
    equal = all(torch.equal(a, b) for a, b in zip(plain.parameters(), kept.parameters(), strict=True))
    print(f"losses and weights equal to those of the trainer alone: {plain.losses == kept.losses and equal}")
    assert stash.keeper is not None
    for home, held in stash.keeper.stats().homes.items():
        print(f"{home}: {held.peak:,} bytes at the peak")


if __name__ == "__main__":
    main()
