"""DeepSpeed's engine under a policy: losses and weights are those without, for each stage of ZeRO.

DeepSpeed compiles an operator for shared memory when it starts on a CPU; that is left out here.
"""

import os
import socket
import sys

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
transformers = pytest.importorskip("transformers", minversion="5.7")

from support.compare import same  # noqa: E402
from support.processes import start_ranks  # noqa: E402

import pagestash as ps  # noqa: E402

HOMES = {
    "stash": [("model.layers.*.mlp.experts", "stash")],
    "offload": [("model.layers.*.self_attn", "offload"), ("model.layers.*.mlp.experts", "offload")],
    "recompute": [("model.layers.*", "recompute")],
}


def policy_of(home):
    moving = {"stash": {"min_bytes": 0}, "offload": {"min_bytes": 0, "prefetch_bytes": 0}, "recompute": {}}
    return ps.Policy(
        [ps.Rule(match, to, **moving[to]) for match, to in HOMES[home]], ps.PoolConfig(page="4KiB")
    )


def model():
    import pagestash.hf

    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="pagestash")
    pagestash.hf.optimize(made)
    return made


def train(stage, home=None, bf16=False):
    """Losses, and weights at the end."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
    }
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=made, optimizer=optimizer, config=config)
    keeper = ps.Keeper(ps.Policy() if home is None else policy_of(home)).attach(engine)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    losses = []
    for _ in range(4):
        tokens = torch.randint(0, 96, (2, 16), generator=generator)
        with keeper.step():
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    weights = []
    for parameter in engine.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            weights.append(parameter.detach().clone())
    engine.destroy()
    return losses, weights, {name for name, use in keeper.stats().homes.items() if use.peak}


def _rank(rank, ranks, port, folder):
    torch.set_num_threads(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "RANK": rank}
    os.environ |= {**{name: str(value) for name, value in place.items()}, "LOCAL_RANK": str(rank)}
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    found = {}
    for stage in (1, 2, 3):
        plain = train(stage)
        for home in HOMES:
            try:
                *kept, homes = train(stage, home)
                found[stage, home] = same(kept, list(plain[:2])) and home in homes
            except ValueError as error:
                found[stage, home] = str(error)
    *plain, _ = train(2, bf16=True)
    *kept, _ = train(2, "offload", bf16=True)
    found["bf16"] = same(plain, kept)
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_and_weights_are_those_without_a_policy(tmp_path, ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_ranks(_rank, (ranks, port, str(tmp_path)), ranks)
    for rank in range(ranks):
        found = torch.load(tmp_path / f"{rank}.pt")
        said = found.pop((3, "recompute"))
        assert "ZeRO-3 frees them after each forward" in said
        assert found == dict.fromkeys(found, True)
