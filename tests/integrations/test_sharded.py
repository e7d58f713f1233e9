"""An optimised model, sharded or replicated over two processes: the numbers of one, and the names of a policy."""

import os

import pytest
import torch
import torch.distributed as dist
from support import same
from support.processes import start_ranks

pytest.importorskip("transformers", minversion="5.7")

import pagestash as ps

WORLD, STEPS = 2, 2
RULES = [
    ps.Rule("model.layers.*.mlp.experts", "stash", min_bytes=0),
    ps.Rule("model.layers.*.*_layernorm", "recompute", min_bytes=0),
    ps.Rule("model.layers.*.self_attn.core_attn", "stash", min_bytes=0),
]


def _layers(model):
    """Each layer a unit, as accelerate shards."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _experts_too(model):
    """Experts and the head units of their own."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer.mlp.experts)
    fully_shard(model.lm_head)
    return _layers(model)


def _first_fsdp(model):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu)


def _replicated(model):
    return torch.nn.parallel.DistributedDataParallel(model)


WAYS = {"layers": _layers, "experts": _experts_too, "FSDP1": _first_fsdp, "DDP": _replicated}


def _batch(step, rank):
    torch.manual_seed(10 * step + rank)
    return torch.randint(3, 96, (2, 11))


def _train(model, rank, keeper):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        ids = _batch(step, rank)
        with keeper.step():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def _weights(model):
    return [getattr(each, "_local_tensor", each).detach().clone() for each in model.parameters()]


def _alone(model, rank):
    """What the ranks would have seen if one process had run their batches: losses of `rank`, weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        found = [
            model(input_ids=ids, labels=ids).loss for ids in (_batch(step, each) for each in range(WORLD))
        ]
        (sum(found) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found[rank].detach())
    return losses, dict(model.named_parameters())


def _rank(rank: int, path: str) -> None:
    os.environ["TRITON_INTERPRET"] = "0"
    torch.set_num_threads(1)
    from tiny import tiny

    import pagestash.hf

    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=WORLD)
    wanted, weights = _alone(tiny("Qwen3-MoE"), rank)
    result = {}
    for way, shard in WAYS.items():
        runs = []
        for attach in (None, "after", "before"):
            model = tiny("Qwen3-MoE", experts="pagestash")
            report = pagestash.hf.optimize(model)
            keeper = ps.Keeper(ps.Policy(rules=RULES) if attach else ps.Policy())
            if attach == "before":  # as in a trainer, which shards when training begins
                keeper.attach(model)
            model = shard(model)
            if attach == "after":
                keeper.attach(model)
            runs.append((_train(model, rank, keeper), _weights(model)))
            if attach is None and way != "FSDP1":
                whole = [
                    getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()
                ]
                runs[0][0].append(max(float((a - b).abs().max()) for a, b in zip(whole, weights.values())))
        drift = runs[0][0].pop() if way != "FSDP1" else 0.0
        result[way] = {
            "losses": runs[0][0],
            "wanted": wanted,
            "drift": drift,
            "equal": [same(run, runs[0]) for run in runs[1:]],
            "regions": sorted(keeper.stats().regions),
            "peaks": {home: held.peak for home, held in keeper.stats().homes.items()},
            "left": [each.why for each in report.left],
        }
    for way in ("layers", "FSDP1"):  # optimised after it was sharded
        report = pagestash.hf.optimize(WAYS[way](tiny("Qwen3-MoE", experts="pagestash")))
        result[f"{way}, late"] = [(each.part, each.why) for each in report.left]
    torch.save(result, f"{path}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    models = ("pagestash.hf", "transformers.models.qwen3_moe.modeling_qwen3_moe")
    start_ranks(_rank, (str(path),), WORLD, imports=models)
    return [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("way", WAYS)
def test_losses_and_weights_are_those_of_one_process(ranks, way):
    for result in ranks:
        found = result[way]
        assert found["left"] == []
        torch.testing.assert_close(found["losses"], found["wanted"], rtol=1e-5, atol=1e-5)
        assert found["drift"] < 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_a_policy_changes_no_bit_and_has_the_models_names(ranks, way):
    """Attached before the model is sharded, and after."""
    for result in ranks:
        found = result[way]
        assert found["equal"] == [True, True]
        assert {"model.layers.0.mlp.experts", "model.layers.1.self_attn.core_attn"} <= set(found["regions"])
        assert found["peaks"]["stash"] > 0
        assert found["peaks"]["recompute"] > 0


def test_a_sharded_model_is_optimised_where_its_weights_have_their_shapes(ranks):
    for result in ranks:
        assert result["layers, late"] == []
        said = "FSDP has flattened its weights; call optimize(model) before the model is wrapped"
        assert result["FSDP1, late"] == [("experts", said)] * 2
