"""Lightning's Trainer with `Stash`, and Fabric: losses, validation and weights are those without, bit for bit."""

import logging
import os
import pickle
import socket
from functools import partial
from pathlib import Path

import pytest
import torch

lightning = pytest.importorskip("lightning", minversion="2.6", reason="Lightning is not installed")

from support.compare import same  # noqa: E402
from support.pages import blocks, run  # noqa: E402
from support.processes import start_ranks  # noqa: E402
from support.search import search_little  # noqa: E402

import pagestash as ps  # noqa: E402
from pagestash.integrations.lightning import Stash  # noqa: E402
from pagestash.models import Decoder, preset  # noqa: E402

RULES = {
    "stash": [ps.Rule("net.layers.*.moe.experts", "stash", min_bytes=0)],
    "offload": [ps.Rule("net.layers.*", "offload", min_bytes=0, prefetch_bytes=0)],
    "recompute": [ps.Rule("net.layers.*", "recompute")],
}
POLICY = ps.Policy(
    [
        ps.Rule("net.layers.*.moe.experts", "stash", min_bytes=0),
        ps.Rule("net.layers.*.*_norm", "offload", min_bytes=0),
        ps.Rule("net.layers.*.attn", "recompute"),
    ],
    ps.PoolConfig(page="4KiB"),
)


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Decoder(preset("tiny", layers=2, width=64, expert_width=32, dense_width=64))
        self.trained, self.validated = [], []

    def training_step(self, batch, index):
        loss = sum(self.net(batch[:, :-1], batch[:, 1:]))
        self.trained.append(loss.detach())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.validated.append(sum(self.net(batch[:, :-1], batch[:, 1:])))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Sharded(Module):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        for part in [*self.net.layers, self.net]:
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (2, 17), generator=generator) for _ in range(count)]


def loader(data):
    return torch.utils.data.DataLoader(data, batch_size=None)


def trainer_of(callback, folder=None, **settings):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    loop = {"max_epochs": 1, "accumulate_grad_batches": 2, "val_check_interval": 2, "gradient_clip_val": 1.0}
    callbacks = [] if callback is None else [callback]
    return lightning.Trainer(accelerator="cpu", callbacks=callbacks, **{**quiet, **loop, **settings})


def fit(callback, kind=Module, **settings):
    """Losses of training and of validation, and the weights."""
    module = kind()
    trainer_of(callback, **settings).fit(module, loader(batches()), loader(batches(2)))
    local = [getattr(each, "to_local", lambda each=each: each)() for each in module.parameters()]
    return module.trained, module.validated, [each.detach().clone() for each in local]


def moved(keeper):
    return {home: use.peak for home, use in keeper.stats().homes.items() if use.peak and home != "keep"}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_losses_and_weights_are_those_of_the_trainer_alone(precision):
    stash = Stash(POLICY)
    plain, kept = fit(None, precision=precision), fit(stash, precision=precision)
    assert len(plain[0]) == 6
    assert len(plain[1]) == 2 * 4
    assert same(plain, kept)
    assert {*moved(stash.keeper)} == {"stash", "offload", "recompute"}


@pytest.mark.parametrize("home", RULES)
def test_each_home_alone(home):
    stash = Stash(ps.Policy(RULES[home], ps.PoolConfig(page="4KiB")))
    assert same(fit(None), fit(stash))
    assert {*moved(stash.keeper)} == {home}


def test_a_policy_comes_from_a_file_too(tmp_path):
    POLICY.save(tmp_path / "policy.toml")
    stash = Stash(tmp_path / "policy.toml")
    fit(stash)
    assert stash.keeper.policy == POLICY


def test_a_checkpoint_goes_on_without_the_callback(tmp_path):
    weights = []
    for callback in (None, Stash(POLICY)):
        first = trainer_of(callback, tmp_path, max_steps=2)
        first.fit(Module(), loader(batches()))
        first.save_checkpoint(tmp_path / "two.ckpt")
        later, module = trainer_of(None, tmp_path, max_epochs=2), Module()
        later.fit(module, loader(batches()), ckpt_path=tmp_path / "two.ckpt", weights_only=False)
        assert later.global_step > 2
        weights.append(module.state_dict())
    assert same(weights[0], weights[1])


def hooks_of(module):
    return sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in module.modules())


def test_after_an_error_the_module_is_as_it_was():
    class Fails(Module):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            if index == 1:
                raise RuntimeError("boom")
            return loss

    module, stash = Fails(), Stash(POLICY)
    with pytest.raises(RuntimeError, match="boom"):
        trainer_of(stash).fit(module, loader(batches()))
    assert hooks_of(module) == 0
    with stash.keeper.step():  # which is not open any more
        pass


def test_batches_without_a_loss_and_epochs_that_end_early():
    class Skips(Module):
        def on_train_batch_start(self, batch, index):
            return -1 if index == 4 else None

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return None if index == 1 else loss

    runs = [fit(callback, Skips, max_epochs=2) for callback in (None, Stash(POLICY))]
    assert len(runs[0][0]) == 2 * 4
    assert same(*runs)


def test_one_callback_serves_several_fits():
    stash = Stash(POLICY)
    for _ in range(2):
        module, plain = Module(), Module()
        trainer_of(stash).fit(module, loader(batches()))
        assert hooks_of(module) == 0
        assert "recompute" in moved(stash.keeper)
        trainer_of(None).fit(plain, loader(batches()))
        assert same(module.state_dict(), plain.state_dict())


def test_manual_optimization_is_refused():
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="automatic_optimization=False"):
        trainer_of(Stash(POLICY), accumulate_grad_batches=1, gradient_clip_val=None).fit(
            module, loader(batches())
        )


def test_a_rule_that_matches_no_module_is_refused_before_training():
    stash = Stash(ps.Policy([ps.Rule("layers.*", "recompute")]))
    module = Module()
    with pytest.raises(ValueError, match=r"net\.layers"):
        trainer_of(stash).fit(module, loader(batches()))
    assert module.trained == []


@pytest.mark.parametrize("given", [POLICY, POLICY.rules, "40%"], ids=["policy", "rules", "budget"])
def test_a_callback_goes_to_a_process_that_is_spawned(given):
    pickle.loads(pickle.dumps(Stash(given)))


def test_what_is_no_policy_is_refused():
    with pytest.raises(TypeError, match=r"Stash: expected a policy.*; got \{"):
        Stash({"rule": []})


def test_a_budget_without_a_model_that_is_called_is_refused():
    with pytest.raises(ValueError, match=r"Module has no forward; .* one of net"):
        trainer_of(Stash("40%")).fit(Module(), loader(batches()))


def test_a_budget_is_planned_for_the_model_that_training_step_calls():
    keeper = ps.Keeper(budget=0.8, loss=sum, repeats=1)
    stash = Stash(keeper, model="net")
    plain, planned = fit(None, accumulate_grad_batches=1), fit(stash, accumulate_grad_batches=1)
    assert stash.keeper is keeper
    assert keeper.plan is not None
    assert not keeper.plan.is_empty
    assert same(plain, planned)


def test_a_budget_of_a_module_that_calls_itself():
    class Calls(Module):
        def forward(self, tokens, targets):
            return sum(self.net(tokens, targets))

        def training_step(self, batch, index):
            return self(batch[:, :-1], batch[:, 1:])

    stash = Stash("80%")
    plain, planned = (fit(each, Calls, accumulate_grad_batches=1)[2] for each in (None, stash))
    assert stash.keeper.plan is not None
    assert not stash.keeper.plan.is_empty
    assert same(plain, planned)


@pytest.mark.parametrize("accumulated", [1, 4])
def test_a_plan_counts_the_state_of_the_optimizer(monkeypatch, accumulated):
    class Plain(Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    search_little(monkeypatch)
    before = []
    for kind in (Plain, Module):
        stash = Stash(ps.Keeper(budget=0.9, loss=sum, repeats=1), model="net")
        fit(stash, kind, accumulate_grad_batches=accumulated)
        before.append(stash.keeper.plan.predicted.at_peak()["base"])
    assert before[1] - before[0] == 2 * sum(each.nbytes for each in Module().parameters())


# --- two ranks ---


def _rank(rank, port, folder):
    torch.set_num_threads(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "NODE_RANK": 0}
    os.environ |= {key: str(value) for key, value in {**place, "LOCAL_RANK": rank, "RANK": rank}.items()}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    from lightning.pytorch.strategies import ModelParallelStrategy

    found = {}
    for name, kind, strategy in (
        ("DDP", Module, lambda: "ddp"),
        ("FSDP2", Sharded, lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)),
    ):
        stash = Stash(POLICY)
        runs = [fit(each, kind, strategy=strategy(), devices=2) for each in (None, stash)]
        found[name] = same(*runs), moved(stash.keeper), runs[0][0]
    torch.save(found, f"{folder}/{rank}.pt")


def test_two_ranks_with_ddp_and_with_fsdp2(tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    start_ranks(_rank, (port, str(tmp_path)), 2, imports=("lightning",))
    for rank in range(2):
        for equal, homes, losses in torch.load(tmp_path / f"{rank}.pt").values():
            assert equal
            assert {*homes} == {"stash", "offload", "recompute"}
            assert len(losses) == 3  # the sampler gives each rank half of the batches


# --- Fabric ---


def fabric_losses(policy, precision):
    torch.manual_seed(0)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    net = Module().net
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    keeper = ps.Keeper(policy).attach(net)
    losses = []
    for batch in batches():
        with keeper.step():
            loss = sum(net(batch[:, :-1], batch[:, 1:]))
            fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, keeper


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_needs_no_adapter(precision):
    rules = [ps.Rule(rule.match.removeprefix("net."), rule.home, min_bytes=0) for rule in POLICY.rules]
    plain, _ = fabric_losses(ps.Policy(), precision)
    kept, keeper = fabric_losses(ps.Policy(rules, POLICY.pool), precision)
    assert same(plain, kept)
    assert {*moved(keeper)} == {"stash", "offload", "recompute"}


def test_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((_, policy),) = blocks("docs/lightning.md", "toml")
    Path("policy.toml").write_text(policy)
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    monkeypatch.setattr(lightning, "Trainer", partial(lightning.Trainer, **quiet))
    monkeypatch.setattr(lightning, "Fabric", partial(lightning.Fabric, accelerator="cpu"))
    printed, names = run("docs/lightning.md", {"module": Module(), "batches": loader(batches())})
    assert {*moved(names["stash"].keeper)} == {"recompute"}  # tensors of less than a MiB do not leave
    assert "planned" in printed[1]
    assert {*moved(names["keeper"])} == {"recompute"}
