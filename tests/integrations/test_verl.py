"""verl's plugin with a stand-in of its FSDP engine: verl itself has engines for GPUs alone.

The stand-in has the signatures, the order of calls and the settings of verl 0.9.1
(`verl/workers/engine/fsdp/transformer_impl.py`, `base.py`).
"""

import importlib
import sys
import types
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support.compare import same

import pagestash as ps
from pagestash.models import Decoder, preset

POLICY = ps.Policy(
    [
        ps.Rule("layers.*.moe.experts", "stash", min_bytes=0),
        ps.Rule("layers.*.attn", "offload", min_bytes=0, prefetch_bytes=0),
        ps.Rule("layers.*.*_norm", "recompute"),
    ],
    ps.PoolConfig(page="4KiB"),
)


class Engine:
    """verl's FSDPEngine, as far as a policy could meet it."""

    def __init__(self, **settings):
        off = {"enable_activation_offload": False, "enable_gradient_checkpointing": False}
        self.model_config = SimpleNamespace(**{**off, **settings})

    def initialize(self):
        torch.manual_seed(0)
        self.module = Decoder(preset("tiny", layers=2, width=64, expert_width=32, dense_width=64))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        found = []
        for micro_batch in data:
            with torch.no_grad() if forward_only else nullcontext():
                loss, told = self.forward_step(
                    micro_batch, loss_function=loss_function, forward_only=forward_only
                )
                if not forward_only:
                    loss.backward()
            found.append(told)
        return found

    def forward_step(self, micro_batch, loss_function, forward_only):
        loss = loss_function(self.module(micro_batch[:, :-1], micro_batch[:, 1:]))
        return loss, loss.detach()

    def train_batch(self, data, loss_function):
        self.optimizer.zero_grad()
        found = self.forward_backward_batch(data, loss_function, forward_only=False)
        self.optimizer.step()
        return found

    def infer_batch(self, data, loss_function=None):
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True)


@pytest.fixture
def engine(monkeypatch):
    """A class of engines that the plugin has changed, as `import verl` makes it."""
    kind = type("FSDPEngine", (Engine,), {"forward_backward_batch": Engine.forward_backward_batch})
    name = "verl.workers.engine.fsdp.transformer_impl"
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:length]), types.ModuleType(".".join(parts[:length])))
    sys.modules[name].FSDPEngine = kind
    monkeypatch.delitem(sys.modules, "pagestash.integrations.verl", raising=False)
    importlib.import_module("pagestash.integrations.verl")
    yield kind
    sys.modules.pop("pagestash.integrations.verl", None)


def trained(kind):
    made = kind()
    made.initialize()
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        data = [torch.randint(0, 256, (2, 17), generator=generator) for _ in range(2)]
        losses += [made.infer_batch(data, sum), made.train_batch(data, sum)]
    return losses, [each.detach().clone() for each in made.module.parameters()], made


def test_losses_and_weights_are_those_without_a_policy(engine, monkeypatch, tmp_path):
    plain = trained(engine)
    assert not hasattr(plain[2], "keeper")
    POLICY.save(tmp_path / "policy.toml")
    monkeypatch.setenv("PAGESTASH_POLICY", str(tmp_path / "policy.toml"))
    kept = trained(engine)
    assert same(kept[:2], plain[:2])
    homes = kept[2].keeper.stats().homes
    assert all(homes[home].peak for home in ("stash", "offload", "recompute"))


@pytest.mark.parametrize("setting", ["enable_activation_offload", "enable_gradient_checkpointing"])
def test_what_takes_tensors_before_a_rule_sees_them_is_refused(engine, monkeypatch, setting):
    monkeypatch.setenv("PAGESTASH_POLICY", "policy.toml")
    made = engine(**{setting: True})
    made.initialize()
    with pytest.raises(ValueError, match=f"{setting}=True"):
        made.train_batch([torch.randint(0, 256, (2, 17))], sum)
