"""The experts implementation `"pagestash"`: transformers' numbers, our saved bytes, rules by name."""

import copy
import gc
import warnings
import weakref

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.7")

from support.compare import error, same  # noqa: E402
from tiny import FAMILIES, NEWER, batch, gradients, tiny  # noqa: E402

import pagestash as ps  # noqa: E402
import pagestash.hf  # noqa: E402
from pagestash.integrations.hf import experts as ours  # noqa: E402
from pagestash.moe.saving import Half  # noqa: E402


def run(model, seed=1):
    model.zero_grad()
    output = model(**batch(seed=seed))
    output.loss.backward()
    return output, gradients(model)


@pytest.mark.parametrize("family", [*FAMILIES, *NEWER])
def test_logits_loss_and_gradients_are_those_of_eager(family):
    wanted, wanted_gradients = run(tiny(family))
    model = tiny(family, experts="pagestash")
    report = pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
    assert [each.part for each in report.replaced if each.part != "router"] in (["experts"], ["experts"] * 2)
    assert report.left == []
    got, found = run(model)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-5, atol=1e-5)
    assert found.keys() == wanted_gradients.keys()
    for name in found:
        torch.testing.assert_close(found[name], wanted_gradients[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *NEWER])
def test_bf16_is_as_near_to_float32_as_grouped_mm_is(family):
    made = (
        tiny(family),
        *(tiny(family, experts=each, dtype=torch.bfloat16) for each in ("grouped_mm", "pagestash")),
    )
    step, errors = 2**-8, []
    for seed in (1, 2, 3):  # in one batch a clamp or a choice that flips may be all that there is to see
        (exact, exact_gradients), (theirs, their_gradients), (got, found) = (run(each, seed) for each in made)
        assert error(got.logits, exact.logits) <= 1.2 * error(theirs.logits, exact.logits) + step
        assert abs(got.loss - theirs.loss) <= 4 * step * theirs.loss
        exact, theirs, got = (
            torch.cat([each[name].float().flatten() for name in found])
            for each in (exact_gradients, their_gradients, found)
        )
        errors.append((error(got, exact), error(theirs, exact)))
    ours, others = map(sum, zip(*errors))
    assert ours <= 1.2 * others + step


def test_bf16_experts_are_nearer_to_the_exact_result_than_eager():
    """gpt-oss rounds most often: after each step of its gate, both biases and the router's weight."""
    model = tiny("gpt-oss", dtype=torch.bfloat16)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(256, 32).bfloat16()
    weights, ids = torch.randn(256, 4).topk(2)
    weights = weights.softmax(-1).bfloat16()
    with torch.no_grad():
        eager = experts(x, ids, weights)
        exact = copy.deepcopy(experts).double()(x.double(), ids, weights.double())
    got = ours.experts_forward(experts, x, ids, weights)
    assert error(got, exact) < 0.8 * error(eager, exact)


POLICIES = {
    "experts stashed": [("model.layers.*.mlp.experts", "stash")],
    "experts recomputed": [("model.layers.*.mlp.experts", "recompute")],
    "experts offloaded": [("model.layers.*.mlp.experts", "offload")],
    "parts": [("**.moe_act", "stash"), ("**.expert_fc1", "offload")],
    "first projection recomputed": [
        ("**.moe_act", "recompute"),
        ("model.layers.*.input_layernorm", "recompute"),
    ],
    "layers recomputed": [("model.layers.*", "recompute")],
    "attention offloaded": [("model.layers.*.self_attn", "offload"), ("**.moe_act", "recompute")],
}


WITHOUT_PARTS = [name for name, rules in POLICIES.items() if not any("**" in match for match, _ in rules)]
"""Of a model that was not optimised the parts have no names."""


@pytest.mark.parametrize(
    ("policy", "optimised"),
    [*((name, True) for name in POLICIES), *((name, False) for name in WITHOUT_PARTS)],
)
def test_a_policy_changes_no_bit(policy, optimised):
    rules = [ps.Rule(*rule, min_bytes=0) for rule in POLICIES[policy]]
    model = tiny("Qwen3-MoE", experts="pagestash")
    if optimised:
        pagestash.hf.optimize(model)
    wanted = run(model)
    keeper = ps.Keeper(ps.Policy(rules=rules)).attach(model)
    for _ in range(3):
        with keeper.step():
            got = run(model)
        assert same((got[0].loss, got[1]), (wanted[0].loss, wanted[1]))
    keeper.detach()
    assert same(run(model)[1], wanted[1])


@pytest.mark.parametrize("family", [*FAMILIES, *NEWER])
def test_stashed_and_offloaded_experts_change_no_bit(family):
    model = tiny(family, experts="pagestash")
    pagestash.hf.optimize(model)
    wanted = run(model)
    rules = [
        ps.Rule("**.moe_act", "stash", min_bytes=0),
        ps.Rule("model.layers.*", "offload", min_bytes=0, prefetch_bytes=0),
    ]
    keeper = ps.Keeper(ps.Policy(rules=rules)).attach(model)
    for _ in range(2):
        with keeper.step():
            got = run(model)
        assert same((got[0].logits, got[0].loss, got[1]), (wanted[0].logits, wanted[0].loss, wanted[1]))
    stats = keeper.stats()
    assert stats.homes["stash"].peak > 0
    assert stats.homes["offload"].peak > 0


def test_the_parts_go_where_their_rules_send_them():
    model = tiny("Mixtral", experts="pagestash")
    pagestash.hf.optimize(model)
    rules = [ps.Rule("**.moe_act", "stash", min_bytes=0), ps.Rule("**.expert_fc1", "offload", min_bytes=0)]
    keeper = ps.Keeper(ps.Policy(rules=rules)).attach(model)
    for _ in range(2):
        with keeper.step():
            run(model)
    assert {f"model.layers.{i}.mlp.experts.moe_act" for i in range(2)} <= set(keeper.stats().regions)
    assert keeper.pool is not None
    assert keeper.reservations > 0


TOKENS, WIDTH, INNER, CHOICES = 24, 32, 16, 2


def given(dtype=torch.bfloat16):
    """Tokens, chosen experts and their weights, the same each time."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    ids = torch.rand(TOKENS, 4, generator=generator).argsort(1)[:, :CHOICES]
    return x, ids, torch.rand(TOKENS, CHOICES, generator=generator).to(dtype).requires_grad_()


def saved_bytes(experts, dtype=torch.bfloat16):
    """Of floating-point tensors that are no parameters, which a forward saves."""
    x, ids, weights = given(dtype)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor
    ):
        experts(x, ids, weights)
    parameters = {parameter.data_ptr() for parameter in experts.parameters()}
    return sum(each.nbytes for at, each in saved.items() if at not in parameters and each.dtype == dtype)


def test_saved_are_the_tokens_the_weights_and_the_first_projection():
    experts = tiny("Qwen3-MoE", experts="pagestash", dtype=torch.bfloat16).model.layers[0].mlp.experts
    wanted = 2 * TOKENS * WIDTH + 2 * TOKENS * CHOICES + 4 * TOKENS * CHOICES * INNER
    assert saved_bytes(experts) == wanted


@pytest.mark.parametrize("family", ["Qwen3-MoE", "gpt-oss"])
def test_the_chosen_ids_are_saved_for_a_bias_alone(family):
    experts = tiny(family, experts="pagestash", dtype=torch.bfloat16).model.layers[0].mlp.experts
    x, ids, weights = given()
    ids, saved = ids.contiguous(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        experts(x, ids, weights)
    assert (ids.data_ptr() in saved) == experts.has_bias


@pytest.mark.parametrize("family", ["Qwen3-MoE", "gpt-oss"])
def test_weights_in_bf16_give_the_bits_of_their_float32_copy(family):
    experts = tiny(family, experts="pagestash", dtype=torch.bfloat16).model.layers[0].mlp.experts

    def run(wide):
        x, ids, weights = given()
        y = experts(x, ids, weights.float() if wide else weights)
        return y, *torch.autograd.grad(y.float().square().sum(), [x, weights, *experts.parameters()])

    assert same(run(wide=False), run(wide=True))


def test_what_a_module_was_asked_for_holds_from_the_next_call_on():
    model = tiny("Qwen3-MoE", experts="pagestash", dtype=torch.bfloat16)
    report = pagestash.hf.optimize(model)
    experts = model.model.layers[0].mlp.experts
    plain, projection = saved_bytes(experts), 4 * TOKENS * CHOICES * INNER
    for module in (experts.moe_act, experts):
        module.use_recompute(True)
        assert saved_bytes(experts) == plain - projection
        module.use_recompute(False)
        assert saved_bytes(experts) == plain
    gradients = []
    for half in (Half(weights=False), Half(inputs=False), None):
        experts.use_half(half)
        x, ids, weights = given()
        y = experts(x, ids, weights)
        gradients.append(torch.autograd.grad(y.sum(), [x, experts.down_proj], allow_unused=True))
    (of_x, no_weight), (no_x, of_weight), both = gradients
    assert no_weight is None
    assert no_x is None
    assert same((of_x, of_weight), both)
    model.double()
    assert saved_bytes(experts, torch.float64) == 4 * (plain - 2 * TOKENS * CHOICES)  # the weights in float32
    model.bfloat16()
    report.undo()
    assert saved_bytes(experts) == plain


def test_a_pool_goes_with_its_keeper():
    model = tiny("Qwen3-MoE", experts="pagestash")
    pagestash.hf.optimize(model)
    keeper = ps.Keeper(ps.Policy(rules=[ps.Rule("**.moe_act", "stash", min_bytes=0)])).attach(model)
    for _ in range(2):
        with keeper.step():
            run(model)
    pool = weakref.ref(keeper.pool)
    keeper.detach()
    del keeper
    gc.collect()
    assert pool() is None


def test_without_gradients_transformers_runs_its_own(monkeypatch):
    model = tiny("Qwen3-MoE", experts="pagestash")
    monkeypatch.setattr(ours, "runs_of", lambda module: pytest.fail("our block was asked for"))
    with torch.no_grad():
        assert model(**batch()).loss.isfinite()
    ids = batch()["input_ids"]
    generated = model.eval().generate(ids, max_new_tokens=3, do_sample=False)
    wanted = tiny("Qwen3-MoE", experts="grouped_mm").eval().generate(ids, max_new_tokens=3, do_sample=False)
    assert same(generated, wanted)


def test_autocast_runs_the_experts_in_its_dtype():
    model, plain = tiny("Qwen3-MoE", experts="pagestash"), tiny("Qwen3-MoE")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, wanted = model(**batch()), plain(**batch())
    got.loss.backward()
    torch.testing.assert_close(got.loss, wanted.loss, rtol=2**-6, atol=0)
    assert all(value.dtype == torch.float32 for value in gradients(model).values())


# --- reports ---


def test_another_implementation_stays_and_the_report_says_how_to_change_it():
    report = pagestash.hf.optimize(tiny("Qwen3-MoE", experts="grouped_mm"))
    assert {each.why for each in report.left} == {
        "experts_implementation is 'grouped_mm'; model.set_experts_implementation('pagestash') makes it ours"
    }


def test_a_model_that_ignores_the_name_is_reported():
    small = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    small._experts_implementation = "pagestash"
    report = pagestash.hf.optimize(transformers.LlamaForCausalLM(small))
    assert [(each.part, each.why) for each in report.left] == [
        ("experts", "none of its modules lets another implementation run it")
    ]


def test_undo_takes_the_parts_away_and_leaves_the_state_dict_alone():
    model = tiny("Qwen3-MoE", experts="pagestash")
    names, keys = [name for name, _ in model.named_modules()], list(model.state_dict())
    wanted = run(model)[1]
    report = pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
    assert "model.layers.0.mlp.experts.moe_act" in dict(model.named_modules())
    assert list(model.state_dict()) == keys
    second = pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
    assert {each.why for each in second.left} == {"optimised already"}
    report.undo()
    assert [name for name, _ in model.named_modules()] == names
    assert same(run(model)[1], wanted)


def test_a_copy_has_experts_of_its_own():
    model = tiny("Qwen3-MoE", experts="pagestash")
    pagestash.hf.optimize(model)
    wanted = run(model)[1]
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert same(run(copied)[1], wanted)


def test_attaching_says_that_no_module_asks_for_the_implementation():
    config = transformers.Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    config._experts_implementation = "pagestash"
    dense = transformers.Qwen3ForCausalLM(config)
    policy = ps.Policy([ps.Rule("model.layers.*.mlp", "recompute")])
    with pytest.warns(UserWarning, match="has no effect on Qwen3ForCausalLM"):
        ps.Keeper(policy).attach(dense)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.Keeper(policy).attach(tiny("Qwen3-MoE", experts="pagestash"))
