"""megatron-core with our experts and under a policy: losses, norms and weights are those without, bit for bit.

Every run is in processes of its own, because what Megatron assumes of a GPU is replaced there.
"""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
sys.path.insert(0, str(Path(__file__).parent / "mcore"))

import tiny as mcore
from support.compare import error, same
from support.pages import blocks
from support.pages import run as run_page
from support.processes import start_ranks

import pagestash as ps

POLICIES = {
    "stash": [("decoder.layers.*.mlp.experts", "stash")],
    "offload": [("decoder.layers.*.mlp.experts", "offload"), ("decoder.layers.*.self_attention", "offload")],
    "recompute": [
        ("decoder.layers.*.mlp.experts", "recompute"),
        ("decoder.layers.*.self_attention", "recompute"),
    ],
    "recompute mlp": [("decoder.layers.*.mlp", "recompute")],
    "recompute layers": [("decoder.layers.*", "recompute")],
}


def policy_of(rules):
    moving = {"stash": {"min_bytes": 0}, "offload": {"min_bytes": 0, "prefetch_bytes": 0}, "recompute": {}}
    return ps.Policy(
        [ps.Rule(match, home, **moving[home]) for match, home in rules], ps.PoolConfig(page="4KiB")
    )


def weights(parts):
    return [value.detach().clone() for part in parts for value in part.parameters()]


def moved(keeper):
    return {home for home, use in keeper.stats().homes.items() if use.peak and home != "keep"}


def run(work, tmp_path, ranks=1, **parallel):
    """Start `work(rank)` in processes with Megatron's groups; what each returned."""
    start_ranks(_work, (work, str(tmp_path), ranks, parallel), ranks, imports=("test_megatron",))
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _work(rank, work, folder, ranks, parallel):
    mcore.begin(rank, ranks, f"{folder}/store", **parallel)
    torch.save(work(rank), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


# --- one rank ---


def _each_policy(rank):
    found = {}
    for name, made in {"ours": {}, "stock": {"ours": False}, "bf16": {"dtype": torch.bfloat16}}.items():
        plain, _, parts = mcore.train(**made)
        expected = plain, weights(parts)
        for policy, rules in POLICIES.items():
            if name != "ours" and policy not in ("offload", "recompute layers"):
                continue
            kept, keeper, parts = mcore.train(policy_of(rules), **made)
            found[name, policy] = same((kept, weights(parts)), expected), moved(keeper)
        found[name] = expected
    return found


def test_losses_norms_and_weights_are_those_without_a_policy(tmp_path):
    (found,) = run(_each_policy, tmp_path)
    runs = {key: value for key, value in found.items() if isinstance(key, tuple)}
    assert len(runs) == len(POLICIES) + 2 + 2
    for (_, policy), (equal, homes) in runs.items():
        assert equal
        assert homes == {policy.split()[0]}
    ours, stock = (
        torch.stack([torch.stack(losses) for losses, _ in found[key][0]]) for key in ("ours", "stock")
    )
    assert error(ours, stock) < 1e-6


THEIRS = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
}


def _beside_theirs(rank):
    found = {}
    for name, settings in THEIRS.items():
        plain, _, parts = mcore.train(**settings)
        expected = plain, weights(parts)
        for policy in ("stash", "offload", "recompute"):
            kept, keeper, parts = mcore.train(policy_of(POLICIES[policy]), **settings)
            found[name, policy] = same((kept, weights(parts)), expected), moved(keeper)
    return found


def test_beside_megatrons_own_recomputation(tmp_path):
    (found,) = run(_beside_theirs, tmp_path)
    assert found == {(name, policy): (True, {policy}) for name, policy in found}


def _logged(rank):
    from megatron.core.transformer.moe import moe_utils

    found = {}
    for name, made in {
        "plain": {},
        "recompute mlp": {"policy": policy_of(POLICIES["recompute mlp"])},
        "recompute layers": {"policy": policy_of(POLICIES["recompute layers"])},
    }.items():
        moe_utils.clear_aux_losses_tracker()
        mcore.train(steps=1, **made)
        found[name] = {
            key: value["values"].clone()
            for key, value in moe_utils.get_moe_layer_wise_logging_tracker().items()
        }
    return found


def test_a_recomputed_layer_logs_its_auxiliary_loss_once(tmp_path):
    (found,) = run(_logged, tmp_path)
    assert found["plain"]["load_balancing_loss"].any()
    assert same(found["recompute mlp"], found["plain"])
    assert same(found["recompute layers"], found["plain"])


def _states(rank):
    (ours,), (stock,) = mcore.model_of(), mcore.model_of(ours=False)
    found = {
        "equal": same(dict(ours.state_dict()), dict(stock.state_dict())),
        "keys": list(ours.state_dict()),
    }
    sharded = [model.sharded_state_dict() for model in (ours, stock)]
    found["sharded keys"] = [
        sorted(
            (key, value.key, getattr(value, "global_offset", None))
            for key, value in each.items()
            if hasattr(value, "key")
        )
        for each in sharded
    ]
    for part in (ours, stock):
        for value in part.parameters():
            torch.nn.init.normal_(value)
    trained = {key: value.clone() for key, value in ours.state_dict().items() if value is not None}
    stock.load_state_dict(ours.state_dict())
    found["into stock"] = same({key: stock.state_dict()[key] for key in trained}, trained)
    for part in ours.parameters():
        part.data.zero_()
    ours.load_state_dict(stock.state_dict())
    found["and back"] = same({key: ours.state_dict()[key] for key in trained}, trained)
    found["children"] = [name for name, _ in ours.named_parameters() if "local_experts" in name]
    return found


def test_state_dicts_are_those_of_sequential_mlp(tmp_path):
    (found,) = run(_states, tmp_path)
    assert found["equal"]
    assert any("local_experts.3.linear_fc2.weight" in key for key in found["keys"])
    assert found["sharded keys"][0] == found["sharded keys"][1]
    assert found["into stock"]
    assert found["and back"]
    assert found["children"] == []


def _wrapped(rank):
    from megatron.core.transformer.module import Float16Module

    (model,) = mcore.model_of(dtype=torch.bfloat16)
    wrapped = Float16Module(model.config, model)
    keeper = ps.Keeper(policy_of(POLICIES["stash"])).attach(wrapped)
    kept, _, _ = mcore.train(parts=[wrapped], policy=policy_of(POLICIES["recompute"]))
    plain, _, _ = mcore.train(parts=[Float16Module(model.config, mcore.model_of(dtype=torch.bfloat16)[0])])
    return len(list(keeper.modules())) > 0, same(kept, plain)


def test_names_are_those_without_float16module(tmp_path):
    assert run(_wrapped, tmp_path) == [(True, True)]


def _evaluated(rank):
    policy = policy_of(POLICIES["offload"])
    _, keeper, parts = mcore.train(policy, steps=1)
    before = keeper.stats()
    with torch.no_grad():
        plain, _, _ = mcore.train(parts=parts, steps=1, forward_only=True)
    return before == keeper.stats(), len(plain)


def test_a_forward_alone_is_no_step(tmp_path):
    assert run(_evaluated, tmp_path) == [(True, 1)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"add_bias_linear": True}, "add_bias_linear=True"),
        ({"activation_func": torch.nn.functional.gelu}, "activation_func='gelu'"),
        ({"gated_linear_unit": False}, "gated_linear_unit=False"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_our_experts_do_not_compute_is_refused(tmp_path, settings, message):
    ((error_type, said),) = run(_Refused(settings), tmp_path)
    assert error_type == "ValueError"
    assert message in said


class _Refused:
    def __init__(self, settings):
        self.settings = settings

    def __call__(self, rank):
        try:
            mcore.model_of(**self.settings)
        except ValueError as raised:
            return type(raised).__name__, str(raised)
        return None


def test_a_spec_without_experts_is_refused():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    with pytest.raises(ValueError, match="no layer of this spec has experts"):
        mcore.layer_spec(get_gpt_layer_local_spec())


def test_the_spec_that_was_given_stays_as_it_is():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(num_experts=4)
    before = repr(spec)
    mcore.layer_spec(spec)
    assert repr(spec) == before


def _page(rank):
    (model,) = mcore.model_of()
    ((_, policy),) = blocks("docs/megatron.md", "toml")
    Path("policy.toml").write_text(policy)
    _, names = run_page("docs/megatron.md", {"config": model.config})
    _, keeper, _ = mcore.train(ps.Policy.load("policy.toml"))
    return names["forward_backward"].__name__, moved(keeper)


def test_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((name, homes),) = run(_page, tmp_path)
    assert name.startswith("forward_backward")
    assert homes == {"recompute"}  # tensors of less than a MiB are not stashed


def _example(rank):
    place = Path(__file__).parents[2] / "examples" / "megatron_train.py"
    spec = importlib.util.spec_from_file_location(place.stem, place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        module.main(["--steps", "2", "--sequence", "32", "--layers", "2", "--width", "64", "--experts", "4"])
    return printed.getvalue()


def test_the_example(tmp_path):
    (printed,) = run(_example, tmp_path)
    assert "losses equal to those without a policy: True" in printed
    held = dict(line.split(": ") for line in printed.splitlines() if line.endswith(" bytes at the peak"))
    assert not held["stash"].startswith("0 ")
    assert not held["recompute"].startswith("0 ")


# --- two ranks ---


class _Parallel:
    def __init__(self, **made):
        self.made = made

    def __call__(self, rank):
        plain, _, parts = mcore.train(**self.made)
        expected, found = (plain, weights(parts)), {}
        for name in ("stash", "offload", "recompute layers"):
            kept, keeper, parts = mcore.train(policy_of(POLICIES[name]), **self.made)
            found[name] = same((kept, weights(parts)), expected), moved(keeper)
        stock, _, _ = mcore.train(ours=False, **self.made)
        found["stock"] = [error(torch.stack(a), torch.stack(b)) for (a, _), (b, _) in zip(plain, stock) if a]
        return found


@pytest.mark.parametrize(
    ("parallel", "made"),
    [
        ({"expert_model_parallel_size": 2}, {}),
        ({"expert_model_parallel_size": 2}, {"moe_token_dispatcher_type": "alltoall"}),
        ({"pipeline_model_parallel_size": 2}, {"pp": 2}),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            {"pp": 2, "stages": 2},
        ),
    ],
    ids=["experts on two ranks", "by all-to-all", "1F1B", "interleaved 1F1B"],
)
def test_two_ranks(tmp_path, parallel, made):
    ranks = run(_Parallel(**made), tmp_path, 2, **parallel)
    for found in ranks:
        assert all(each < 1e-5 for each in found.pop("stock"))
        assert {name: equal for name, (equal, _) in found.items()} == dict.fromkeys(found, True)
    for name in ("stash", "offload", "recompute layers"):
        assert any(name.split()[0] in found[name][1] for found in ranks)
