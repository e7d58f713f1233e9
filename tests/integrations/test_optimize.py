"""`optimize`: the model's own numbers from our kernels, one model at a time, and the way back."""

import copy
import functools
import importlib
import pickle
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.7")

from support import flex  # noqa: E402
from support.compare import error, same  # noqa: E402
from support.tiers import slow_but  # noqa: E402
from tiny import FAMILIES, NEWER, ROUTED_OTHERWISE, as_it_is, batch, gradients, tiny  # noqa: E402

import pagestash as ps  # noqa: E402
import pagestash.hf  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "huggingface.toml"


def run(model, **more):
    model.zero_grad()
    output = model(**batch(), **more)
    output.loss.backward()
    return output, gradients(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_logits_and_gradients_are_the_models_own(family):
    model = tiny(family)
    wanted, wanted_gradients = run(model)
    report = pagestash.hf.optimize(model)
    got, found = run(model)
    assert not report.never_called()
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-5, atol=1e-5)
    assert found.keys() == wanted_gradients.keys()
    for name in found:
        torch.testing.assert_close(found[name], wanted_gradients[name], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        logits = model.eval()(**batch()).logits
    torch.testing.assert_close(logits, wanted.logits, rtol=1e-5, atol=1e-5)
    parts = {each.part for each in report.replaced}
    assert parts == {
        "router",
        "attention",
        "masks",
        "norm",
        "head",
        *(() if family == "Gemma4" else ("rope",)),
    }


@pytest.mark.parametrize("family", ["Qwen3-MoE", "gpt-oss"])
def test_bf16_differs_by_a_rounding_step(family):
    model = tiny(family, dtype=torch.bfloat16)
    wanted, _ = run(model)
    pagestash.hf.optimize(model)
    with torch.no_grad():
        got = model(**batch(), skip_logits=False)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(got.loss, wanted.loss, rtol=2**-7, atol=0)


@pytest.mark.parametrize("family", ["Qwen3-MoE", "DeepSeek-V3", "gpt-oss"])
def test_a_router_runs_once_where_its_layer_is_recomputed(family):
    policy = ps.Policy([ps.Rule("model.layers.*", "recompute", min_bytes=0)])
    calls, found = {}, {}
    for optimized in (False, True):
        model = tiny(family, experts="pagestash")
        if optimized:
            pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
        kept = ps.Keeper(policy).attach(model)
        calls[optimized] = 0
        with pytest.MonkeyPatch.context() as patch:
            for kind in {type(each) for each in model.modules() if "Router" in type(each).__name__}:

                def counted(self, *args, _theirs=kind.forward, _on=optimized, **options):
                    calls[_on] += 1
                    return _theirs(self, *args, **options)

                patch.setattr(kind, "forward", counted)
            with kept.step():
                found[optimized] = run(model)[1]
    routers = sum("Router" in type(each).__name__ for each in model.modules())
    assert calls == {False: 2 * routers, True: routers}
    assert same(found[True], found[False])


@pytest.mark.parametrize("family", ROUTED_OTHERWISE)
def test_a_router_of_any_kind_chooses_once_where_its_layer_is_recomputed(family):
    policy = ps.Policy([ps.Rule("model.layers.*", "recompute", min_bytes=0)])
    calls, found = {}, {}
    for optimized in (False, True):
        model = tiny(family, experts="pagestash")
        if optimized:
            report = pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
            assert [each.part for each in report.replaced].count("router") == 2
        kept = ps.Keeper(policy).attach(model)
        calls[optimized] = 0
        with pytest.MonkeyPatch.context() as patch:

            def counted(*args, _theirs=torch.topk, _on=optimized, **options):
                calls[_on] += 1
                return _theirs(*args, **options)

            patch.setattr(torch, "topk", counted)
            with kept.step():
                found[optimized] = run(model)[1]
    assert calls == {False: 4, True: 2}
    assert same(found[True], found[False])
    report.undo()
    assert not any("route_tokens_to_experts" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("family", [*FAMILIES, *NEWER])
def test_every_layer_of_experts_has_its_router(family):
    report = pagestash.hf.optimize(tiny(family, experts="pagestash"))
    assert [each for each in report.left if each.part == "router"] == []


def test_a_layer_that_hides_its_choice_is_reported():
    model = tiny("Qwen3-MoE", experts="pagestash")
    for layer in model.model.layers:
        layer.mlp.gate = torch.nn.Linear(32, 4)
    left = [each for each in pagestash.hf.optimize(model).left if each.part == "router"]
    assert [each.name for each in left] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert {each.why for each in left} == {"no router was found, so a recomputed layer chooses again"}


def test_undo_gives_back_the_bits_and_the_instances():
    model = tiny("Qwen3-MoE", experts="pagestash")
    output, before = run(model)
    modules, bits = as_it_is(model)
    report = pagestash.hf.optimize(model)
    assert as_it_is(model)[0] != modules
    report.undo()
    report.undo()
    assert as_it_is(model)[0] == modules
    assert same(as_it_is(model)[1], bits)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert "core_attn" not in {name.rpartition(".")[2] for name, _ in model.named_modules()}
    after, found = run(model)
    assert same((after.loss, after.logits, found), (output.loss, output.logits, before))


def test_two_models_of_one_class_can_differ():
    plain, other = tiny("Mixtral"), tiny("Mixtral")
    pagestash.hf.optimize(other)
    assert saved_bytes(other) < saved_bytes(plain)
    assert run(plain)[0].logits is not None
    assert run(other)[0].logits is None


def saved_bytes(model):
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor
    ):
        model(**batch())
    return sum(tensor.nbytes for tensor in saved.values())


def test_a_part_is_left_alone_where_it_is_not_asked_for():
    for part in ("norm", "rope", "attention", "head"):
        options = {each: each == part for each in ("experts", "norm", "rope", "attention", "head")}
        report = pagestash.hf.optimize(tiny("OLMoE"), **options)
        assert {each.part for each in report.replaced} == {part} | (
            {"masks"} if part == "attention" else set()
        )


def test_a_copy_of_the_model_is_optimised_too_and_shares_nothing():
    model = tiny("Qwen3-MoE")
    pagestash.hf.optimize(model)
    copied = copy.deepcopy(model)
    wanted, found = run(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    got, of_copy = run(copied)
    assert same(got.loss, wanted.loss)
    assert same(of_copy, found)


def test_an_optimised_model_is_not_pickled_and_says_what_to_do():
    model = tiny("Qwen3-MoE", experts="pagestash")
    wanted = run(model)[1]
    assert same(run(pickle.loads(pickle.dumps(model)))[1], wanted)
    report = pagestash.hf.optimize(model)
    with pytest.raises(TypeError, match=r"cannot be pickled: save its state_dict .* report.undo\(\) first"):
        pickle.dumps(model)
    report.undo()
    assert same(run(pickle.loads(pickle.dumps(model)))[1], wanted)


def test_what_was_saved_to_disk_loads_in_a_plain_model(tmp_path):
    model = tiny("Qwen3-MoE")
    keys = list(model.state_dict())
    pagestash.hf.optimize(model)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert same(plain.state_dict(), model.state_dict())


@pytest.mark.parametrize("family", ["Qwen3-MoE", "Mixtral", "gpt-oss"])
def test_autocast_gives_its_precision_and_float32_gradients(family):
    """What Trainer's bf16=True does around a model in float32."""
    plain, model = tiny(family), tiny(family, experts="pagestash")
    pagestash.hf.optimize(model)
    results = []
    for each in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = each(**batch()).loss
        loss.backward()
        results.append((loss.detach(), torch.cat([value.flatten() for value in gradients(each).values()])))
    exact = run(tiny(family))
    exact = exact[0].loss, torch.cat([value.flatten() for value in exact[1].values()])
    torch.testing.assert_close(results[1][0], exact[0], rtol=2**-6, atol=0)
    assert results[1][1].dtype == torch.float32
    assert error(results[1][1], exact[1]) <= 1.2 * error(results[0][1], exact[1]) + 2**-8


# --- the head as HF does it ---


@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": torch.tensor(17)},
        {"num_items_in_batch": 17},
        {"shift_labels": torch.randint(3, 96, (2, 11))},
        {"ignore_index": 5, "shift_labels": torch.arange(22).view(2, 11) % 7},
        {"output_router_logits": True},
    ],
    ids=lambda more: next(iter(more)),
)
def test_the_loss_takes_what_the_models_own_takes(more):
    model = tiny("Qwen3-MoE")
    wanted, wanted_gradients = run(model, **more)
    pagestash.hf.optimize(model, norm=False, rope=False, attention=False)
    got, found = run(model, **more)
    assert got.logits is None
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-6, atol=1e-6)
    for name in found:
        torch.testing.assert_close(found[name], wanted_gradients[name], rtol=1e-5, atol=1e-5)


def test_logits_are_there_where_they_are_asked_for():
    model = tiny("Qwen3-MoE")
    wanted = model(**batch())
    pagestash.hf.optimize(model, norm=False, rope=False, attention=False)
    ids = batch()["input_ids"]
    assert same(model(input_ids=ids).logits, wanted.logits)
    assert same(model(**batch(), skip_logits=False).logits, wanted.logits)
    kept = model(input_ids=ids, logits_to_keep=2).logits
    torch.testing.assert_close(kept, wanted.logits[:, -2:])
    assert same(model.eval()(**batch()).logits, wanted.logits)
    as_tuple = model.train()(**batch(), return_dict=False)
    torch.testing.assert_close(as_tuple[0], wanted.loss)
    assert all(not isinstance(each, torch.Tensor) or each.ndim == 0 for each in as_tuple)


def test_a_forward_that_raises_leaves_the_loss_function_as_it_was():
    model = tiny("Qwen3-MoE")
    pagestash.hf.optimize(model)
    before = model.loss_function
    with pytest.raises(Exception, match=r"."):
        model(input_ids=torch.full((1, 3), 10_000), labels=torch.zeros(1, 3, dtype=torch.int64))
    assert model.loss_function is before
    assert run(model)[0].loss.isfinite()


def test_the_signature_stays_that_of_the_model():
    """Trainer reads it: which columns to keep, and whether the loss takes num_items_in_batch."""
    import inspect

    model = tiny("Qwen3-MoE")
    wanted = inspect.signature(model.forward)
    pagestash.hf.optimize(model)
    assert inspect.signature(model.forward) == wanted


# --- beside others ---


@pytest.mark.parametrize("family", ["Qwen3-MoE", "Mixtral"])
def test_undo_leaves_what_accelerate_has_wrapped_since(family):
    """Mixed precision stays, and what it wraps is the model's own again."""
    accelerate = pytest.importorskip("accelerate")

    def prepared(model):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # one for a process
        return accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)

    wanted, wanted_gradients = run(prepared(tiny(family)))
    model = tiny(family)
    report = pagestash.hf.optimize(model)
    prepared(model)
    assert run(model)[0].logits is None
    theirs = model.forward
    assert {each.why for each in pagestash.hf.optimize(model).left} >= {"optimised already"}
    report.undo()
    report.undo()
    assert model.forward == theirs
    got, found = run(model)
    assert same((got.loss, got.logits, found), (wanted.loss, wanted.logits, wanted_gradients))
    assert got.logits.dtype == torch.float32
    again = pagestash.hf.optimize(model)
    said = "accelerate has wrapped its forward; call optimize(model) before the model is prepared"
    assert any(each.part == "head" and each.why.startswith(said) for each in again.left)


def test_a_model_that_a_device_map_divides_is_left_alone_and_the_report_says_why():
    accelerate = pytest.importorskip("accelerate")
    model = tiny("Qwen3-MoE", experts="pagestash")
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    report = pagestash.hf.optimize(model)
    assert report.replaced == []
    assert {each.why.partition(";")[0] for each in report.left} == {"accelerate has wrapped its forward"}


def test_undo_switches_off_what_others_have_wrapped_anywhere():
    model = tiny("Qwen3-MoE")
    wanted = run(model)
    report = pagestash.hf.optimize(model)
    called = []
    for name, module in model.named_modules():
        if "forward" in module.__dict__:
            module.forward = lambda *args, inner=module.forward, name=name, **more: (
                called.append(name) or inner(*args, **more)
            )
    run(model)
    wrapped = set(called)
    assert wrapped >= {"", "lm_head", "model.norm", "model.layers.0.self_attn"}
    report.undo()
    called.clear()
    got = run(model)
    assert set(called) == wrapped
    assert same((got[0].loss, got[0].logits, got[1]), (wanted[0].loss, wanted[0].logits, wanted[1]))


def test_what_another_library_has_replaced_stays():
    model = tiny("Qwen3-MoE")
    norm, attention = model.model.norm, model.model.layers[0].self_attn
    for module in (norm, attention, model):
        module.forward = type(module).forward.__get__(module)
    mine = {module: module.forward for module in (norm, attention, model)}
    report = pagestash.hf.optimize(model, experts=False)
    left = {(each.part, each.name): each.why for each in report.left}
    assert left.keys() == {
        ("norm", "model.norm"),
        ("rope", "model.layers.0.self_attn"),
        ("attention", "model.layers.0.self_attn"),
        ("head", "(the model)"),
    }
    assert set(left.values()) == {"another library has replaced its forward"}
    report.undo()
    assert {module: module.forward for module in mine} == mine


def test_a_second_call_changes_nothing():
    model = tiny("Qwen3-MoE")
    first = pagestash.hf.optimize(model, experts=False)
    second = pagestash.hf.optimize(model, experts=False)
    assert second.replaced == []
    assert {each.why for each in second.left} == {"optimised already"}
    second.undo()
    assert run(model)[0].logits is None
    first.undo()


def test_a_norm_that_computes_something_else_is_left():
    model = tiny("Qwen3-MoE")

    class OddRMSNorm(type(model.model.norm)):
        def forward(self, hidden_states):
            return super().forward(hidden_states) * 2

    model.model.norm.__class__ = OddRMSNorm
    report = pagestash.hf.optimize(model, experts=False)
    assert [(each.name, each.kind) for each in report.left] == [("model.norm", "OddRMSNorm")]


def test_adapters_around_a_model_do_not_hide_it():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny("Qwen3-MoE"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    wanted, wanted_gradients = run(model)
    report = pagestash.hf.optimize(model)
    assert "model.layers.0.self_attn.q_norm" in {each.name for each in report.replaced}
    got, found = run(model)
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-5, atol=1e-5)
    for name in wanted_gradients:
        torch.testing.assert_close(found[name], wanted_gradients[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "rules",
    [
        [("model.layers.*.self_attn", "stash")],
        [("model.layers.*.input_layernorm", "recompute"), ("model.layers.*.self_attn.*_norm", "recompute")],
        [("model.layers.*", "recompute")],
        [("model.layers.*.self_attn", "offload"), ("model.layers.*.*_layernorm", "recompute")],
        [(rule.match, rule.home) for rule in ps.Policy.load(EXAMPLE).rules],
    ],
    ids=["stash", "norms", "layers", "offload", "example"],
)
def test_a_policy_changes_no_bit(rules):
    model = tiny("Qwen3-MoE", experts="pagestash")
    pagestash.hf.optimize(model)
    wanted = run(model)
    keeper = ps.Keeper(ps.Policy(rules=[ps.Rule(*rule, min_bytes=0) for rule in rules])).attach(model)
    for _ in range(3):
        with keeper.step():
            got = run(model)
        assert same((got[0].loss, got[1]), (wanted[0].loss, wanted[1]))
    assert any(keeper.stats().homes[home].peak for _, home in rules)


LAYERS, ATTENTION = "model.layers.*", "model.layers.*.self_attn"
RECOMPUTED = [
    *((family, LAYERS) for family in (*FAMILIES, *NEWER) if family != "Gemma4"),
    *((family, ATTENTION) for family in (*FAMILIES, *NEWER) if family not in ("Gemma4", "Nemotron-H")),
    ("Gemma4", "model.layers.*.self_attn.core_attn"),
]


def recomputing(model, match):
    rules = [ps.Rule(each, "recompute", min_bytes=0) for each in (match, "**.moe_act")]
    return ps.Keeper(ps.Policy(rules)).attach(model)


@pytest.mark.parametrize(
    ("family", "match"), slow_but([pair for pair in RECOMPUTED if pair[1] != ATTENTION], RECOMPUTED)
)
def test_recomputing_changes_no_bit_of_any_family(family, match):
    model = tiny(family, experts="pagestash")
    pagestash.hf.optimize(model)
    wanted = run(model)
    keeper = recomputing(model, match)
    for _ in range(2):
        with keeper.step():
            got = run(model)
        assert same((got[0].loss, got[1]), (wanted[0].loss, wanted[1]))
    assert keeper.stats().homes["recompute"].peak > 0


@pytest.mark.parametrize("match", [LAYERS, ATTENTION])
def test_attention_that_hands_keys_on_to_other_layers_is_not_recomputed(match):
    """Gemma-4's writes them to a dict that all layers get."""
    types = ["sliding_attention", "full_attention", "full_attention"]
    model = tiny(
        "Gemma4", experts="pagestash", num_hidden_layers=3, num_kv_shared_layers=1, layer_types=types
    )
    pagestash.hf.optimize(model)
    keeper = recomputing(model, match)
    with pytest.raises(RuntimeError, match=r"changes its argument a (UserDict|KVSharingDict)"), keeper.step():
        run(model)


@pytest.mark.parametrize("home", ["stash", "offload", "recompute"])
@pytest.mark.parametrize(
    ("family", "implementation"),
    [("Qwen3-MoE", "eager"), ("Qwen3-MoE", "sdpa"), ("gpt-oss", "flex_attention")],
)
def test_the_core_of_attention_has_a_name_and_any_home(monkeypatch, family, implementation, home):
    flex.stand_in(monkeypatch)
    model = tiny(family, attention=implementation, attention_dropout=0.1)
    pagestash.hf.optimize(model)

    def seeded():
        torch.manual_seed(7)
        return run(model)

    wanted = seeded()
    rule = ps.Rule("model.layers.*.self_attn.core_attn", home, min_bytes=0)
    keeper = ps.Keeper(ps.Policy(rules=[rule])).attach(model)
    for _ in range(3):
        with keeper.step():
            got = seeded()
        assert same((got[0].loss, got[1]), (wanted[0].loss, wanted[1]))
    assert "model.layers.0.self_attn.core_attn" in keeper.stats().regions


def test_flex_attention_has_our_rotary_kernel_and_the_numbers_of_eager(monkeypatch):
    flex.stand_in(monkeypatch)
    model = tiny("gpt-oss", attention="flex_attention")
    report = pagestash.hf.optimize(model)
    assert {"rope", "attention"} <= {each.part for each in report.replaced}
    got, wanted = run(model), run(tiny("gpt-oss"))
    assert model.model.layers[0].self_attn.core_attn.function is flex.attend
    torch.testing.assert_close(got[0].loss, wanted[0].loss)
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-4, atol=1e-5)


def test_masks_are_those_of_the_model():
    model = tiny("Qwen3-MoE", attention="sdpa")
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[0, :4] = 0
    wanted = run(model, attention_mask=mask)
    pagestash.hf.optimize(model)
    got = run(model, attention_mask=mask)
    torch.testing.assert_close(got[0].loss, wanted[0].loss, rtol=1e-5, atol=1e-5)
    for name, value in wanted[1].items():
        torch.testing.assert_close(got[1][name], value, rtol=1e-5, atol=1e-5)


@pytest.fixture
def captured(monkeypatch):
    """Transformers and we take what runs for a capture, once this is called."""

    def begin():
        monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
        monkeypatch.setattr("pagestash.integrations.hf.attention.capturing", lambda: True)

    return begin


def masks_given(model):
    """The masks that attention functions were called with."""
    seen = []
    for layer in model.model.layers:
        core = layer.self_attn.core_attn

        def forward(query, key, value, attention_mask=None, core=core, inner=core.forward, **options):
            function = core.function
            core.function = lambda module, q, k, v, mask, **more: (
                seen.append(mask) or function(module, q, k, v, mask, **more)
            )
            return inner(query, key, value, attention_mask, **options)

        core.forward = forward
    return seen


def test_a_captured_step_has_the_mask_of_an_eager_one(captured):
    model = tiny("Qwen3-MoE", attention="sdpa")
    pagestash.hf.optimize(model)
    wanted = run(model)
    seen = masks_given(model)
    captured()
    got = run(model)
    assert seen == [None, None]
    assert same((got[0].loss, got[1]), (wanted[0].loss, wanted[1]))


def test_a_captured_step_of_other_shapes_keeps_its_mask(captured):
    model = tiny("Qwen3-MoE", attention="sdpa")
    pagestash.hf.optimize(model)
    run(model)
    seen = masks_given(model)
    captured()
    model(input_ids=batch(tokens=7)["input_ids"], position_ids=torch.arange(7)[None])
    assert [mask.shape for mask in seen] == [(2, 1, 7, 7)] * 2


def test_a_padding_mask_in_a_captured_step_is_refused_by_name(captured):
    model = tiny("Qwen3-MoE", attention="sdpa")
    report = pagestash.hf.optimize(model)
    mask = torch.ones(2, 11, dtype=torch.int64)
    run(model, attention_mask=mask)
    captured()
    with pytest.raises(RuntimeError, match="attention_mask is a padding mask, and a CUDA graph"):
        run(model, attention_mask=mask)
    report.undo()
    run(model, attention_mask=mask)


@pytest.mark.slow
def test_an_optimised_layer_compiles_to_the_same_numbers():
    model = tiny("Qwen3-MoE")
    pagestash.hf.optimize(model)
    wanted, wanted_gradients = run(model)
    layer = model.model.layers[0]
    layer.self_attn = torch.compile(layer.self_attn, backend="aot_eager")
    got, found = run(model)
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-6, atol=1e-6)
    for name, value in found.items():
        torch.testing.assert_close(
            value, wanted_gradients[name.replace("_orig_mod.", "")], rtol=1e-5, atol=1e-6
        )


def test_experts_in_fp8_are_left_and_the_report_says_why():
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    model = tiny("Qwen3-MoE", experts="pagestash")
    replace_with_fp8_linear(
        model, ["lm_head", "gate"], quantization_config=transformers.FineGrainedFP8Config()
    )
    report = pagestash.hf.optimize(model)
    left = [each for each in report.left if each.part == "experts"]
    assert [(each.kind, each.why) for each in left] == [
        ("FP8Experts", "its weights are quantised (torch.float8_e4m3fn)")
    ] * 2
    assert "experts" not in {each.part for each in report.replaced}


def test_experts_in_fp8_run_by_transformers_own_function(monkeypatch):
    """Their registry is another one, and knows the name too."""
    from transformers.integrations import finegrained_fp8

    asked = []
    monkeypatch.setattr(
        finegrained_fp8, "fp8_grouped_mm_experts_forward", lambda *arguments: asked.append(arguments)
    )
    function = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS.get_interface("pagestash", None)
    module = torch.nn.Module()
    with pytest.warns(UserWarning, match="pagestash runs Module by transformers' grouped_mm"):
        function(module, 1, 2, 3)
    assert asked == [(module, 1, 2, 3)]


def test_a_model_without_experts_to_run_is_told_so():
    """transformers takes the name for any model, and asks nobody."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="pagestash")
    report = pagestash.hf.optimize(model)
    said = "none of its modules lets another implementation run it"
    assert ("experts", "(the model)", said) in {(each.part, each.name, each.why) for each in report.left}


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), torch.nn.Sequential(), "Qwen/Qwen3-30B-A3B"])
def test_a_model_that_is_not_of_transformers_is_refused_by_name(model):
    before = as_it_is(model) if isinstance(model, torch.nn.Module) else None
    with pytest.raises(ValueError, match=rf"{type(model).__name__} is no model of transformers"):
        pagestash.hf.optimize(model)
    if before is not None:
        assert as_it_is(model)[0] == before[0]


def test_experts_that_transformers_runs_by_itself_are_named_with_what_they_are():
    """As gpt-oss's in mxfp4: another class, that asks no registry, with packed weights."""

    class Mxfp4Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.down_proj = torch.nn.Parameter(torch.zeros(4, 32, 1, 16, dtype=torch.uint8), False)

    model = tiny("gpt-oss", experts="pagestash")
    for layer in model.model.layers:
        layer.mlp.experts = Mxfp4Experts()
    left = [each for each in pagestash.hf.optimize(model).left if each.part == "experts"]
    assert [(each.name, each.kind) for each in left] == [
        (f"model.layers.{number}.mlp.experts", "Mxfp4Experts") for number in range(2)
    ]
    said = "its weights are quantised (torch.uint8), and transformers lets no other implementation run it"
    assert {each.why for each in left} == {said}


@pytest.mark.parametrize("fails", ["norms", "attention", "head"])
def test_what_fails_half_way_leaves_the_model_as_it_was(monkeypatch, fails):
    model = tiny("Qwen3-MoE", experts="pagestash")
    run(model)
    before = as_it_is(model)

    def broken(*_, **__):
        raise RuntimeError("half way")

    monkeypatch.setattr(
        importlib.import_module("pagestash.integrations.hf.optimize"),
        {"norms": "replace_norms", "attention": "replace_attention", "head": "replace_head"}[fails],
        broken,
    )
    with pytest.raises(RuntimeError, match="half way"):
        pagestash.hf.optimize(model)
    assert as_it_is(model)[0] == before[0]


def test_the_report_names_what_no_forward_has_reached():
    model = tiny("Qwen3-MoE")
    model.model.spare = copy.deepcopy(model.model.norm)
    report = pagestash.hf.optimize(model)
    assert "never called" not in str(report)
    run(model)
    assert [(each.part, each.name) for each in report.never_called()] == [("norm", "model.spare")]
    assert "replaced, and never called so far:\n  norm       1 × Qwen3MoeRMSNorm" in str(report)


def test_the_report_claims_no_kernel_that_a_call_went_past():
    """Autocast leaves the tables of a float32 model in float32 beside queries in bf16: another kernel's case."""
    model = tiny("Mixtral", experts="pagestash")
    report = pagestash.hf.optimize(model)

    def idle():
        return {each.part for each in report.never_called()}

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(batch()["input_ids"])
    assert idle() == {"experts", "rope", "head"}  # (without gradients experts are transformers')
    with torch.autocast("cpu", torch.bfloat16):
        run(model)
    assert idle() == {"rope"}
    assert "replaced, and never called so far:\n  rope       2 × MixtralAttention" in str(report)
    run(model)
    assert idle() == set()


def test_llama_4s_experts_are_left_and_the_report_says_why():
    config = transformers.Llama4TextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=16, intermediate_size_mlp=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="pagestash")
    left = {each.name: each.why for each in pagestash.hf.optimize(model).left if each.part == "experts"}
    assert "every expert on every token" in left["model.layers.0.feed_forward.experts"]


@pytest.mark.slow
def test_an_optimised_model_is_one_graph_with_the_same_bits():
    model = tiny("Qwen3-MoE", experts="pagestash")
    pagestash.hf.optimize(model)
    _, wanted = run(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    compiled(**batch()).loss.backward()
    assert same(gradients(model), wanted)


def test_the_report_can_be_read():
    text = str(pagestash.hf.optimize(tiny("Gemma4")))
    assert re.search(r"norm +19 × Gemma4RMSNorm: the RMSNorm kernel", text)
    assert "Gemma4ForCausalLM: the loss by chunks of logits" in text


class GroupedRMSNorm(torch.nn.Module):
    """Normalises groups of a row where it has a group size, as some models' norms do."""

    def __init__(self, width, group_size=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(width))
        self.variance_epsilon, self.group_size = 1e-6, group_size or width

    def forward(self, hidden_states):
        groups = hidden_states.float().unflatten(-1, (-1, self.group_size))
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * groups.flatten(-2).to(hidden_states.dtype)


class GatedRMSNorm(GroupedRMSNorm):
    def forward(self, hidden_states, gate=None):
        if gate is not None:
            hidden_states = hidden_states * torch.nn.functional.silu(gate)
        return super().forward(hidden_states)


def test_norms_of_one_class_that_differ_are_told_apart():
    model = tiny("OLMoE")
    model.whole, model.parts, model.gated = GroupedRMSNorm(96), GroupedRMSNorm(96, 8), GatedRMSNorm(96)
    x, gate = torch.randn(5, 96), torch.randn(5, 96)
    wanted = [model.whole(x), model.parts(x), model.gated(x, gate)]
    report = pagestash.hf.optimize(model, rope=False, attention=False, head=False)
    torch.testing.assert_close([model.whole(x), model.parts(x), model.gated(x, gate)], wanted)
    assert "whole" in {each.name for each in report.replaced}
    left = {each.name: each.why for each in report.left}
    assert left["parts"] == "it computes something else than the kernel"
    assert left["gated"] == "its forward takes more than rows"


def test_undo_while_a_keeper_is_attached_lets_it_detach():
    model = tiny("Qwen3-MoE", experts="pagestash")
    report = pagestash.hf.optimize(model)
    rules = [
        ps.Rule("model.layers.0.mlp.experts", "stash"),
        ps.Rule("model.layers.1.mlp.experts.moe_act", "recompute"),
    ]
    keeper = ps.Keeper(ps.Policy(rules)).attach(model)
    with keeper.step():
        _, wanted = run(model)
    report.undo()
    with keeper.step():
        _, found = run(model)
    keeper.detach()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)


def test_a_rotary_function_may_be_called_for_queries_alone():
    from pagestash.integrations.hf.report import Ran
    from pagestash.integrations.hf.rotary import rotary_by_kernel

    def apply_rotary(q, k=None, cos=None, sin=None):
        def turned(x):
            half = x.shape[-1] // 2
            swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
            return x * cos.unsqueeze(1) + swapped * sin.unsqueeze(1)

        return turned(q) if k is None else (turned(q), turned(k))

    found = rotary_by_kernel({"apply_rotary": apply_rotary}, Ran())
    assert not isinstance(found, str)
    q, cos, sin = torch.randn(2, 4, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    assert same(found["apply_rotary"](q, cos=cos, sin=sin), apply_rotary(q, cos=cos, sin=sin))


def decorated(model, decorate):
    """`model`, whose attention's forward is inside a decorator."""
    for layer in model.model.layers:
        kind = type(layer.self_attn)
        layer.self_attn.__class__ = type(kind.__name__, (kind,), {"forward": decorate(kind.forward)})
    return model


def test_decorators_of_attention_stay_around_it():
    calls = []

    def noting(function):
        @functools.wraps(function)
        def around(*args, **options):
            calls.append(function)
            return function(*args, **options)

        return around

    model = decorated(tiny("Qwen3-MoE"), noting)
    wanted = run(model)
    before = len(calls)
    report = pagestash.hf.optimize(model, norm=False, head=False)
    assert {"rope", "attention"} <= {each.part for each in report.replaced}
    assert torch.equal(run(model)[0].loss, wanted[0].loss)
    assert len(calls) == 2 * before > 0
    assert model.model.layers[0].self_attn.core_attn.function is not None


def test_a_decorator_that_hides_attention_is_reported():
    def hiding(function):
        @functools.wraps(function)
        def around(*args, **options):
            return around.__wrapped__(*args, **options)

        return around

    report = pagestash.hf.optimize(decorated(tiny("Qwen3-MoE"), hiding))
    whys = {each.part: each.why for each in report.left}
    assert whys["rope"] == whys["attention"] == "its decorators do not say which function they call"


class OnGpu:
    """In the place of a parameter, of which only the device is asked."""

    is_cuda = True


@pytest.mark.parametrize(("chosen", "said"), [("eager", True), ("flex_attention", False)])
def test_attention_with_sinks_is_told_of_its_kernel(chosen, said):
    model = tiny("gpt-oss")
    for layer in model.model.layers:
        del layer.self_attn._parameters["sinks"]
        layer.self_attn.__dict__["sinks"] = OnGpu()
    model.config._attn_implementation = chosen
    report = pagestash.hf.optimize(model, norm=False, rope=False, head=False)
    whys = [each.why for each in report.left if each.part == "attention"]
    assert ["set_attn_implementation('flex_attention')" in why for why in whys] == [said] * (2 * said)


def test_weights_that_zero3_has_taken_apart_are_named():
    model = tiny("Qwen3-MoE", experts="pagestash")
    for layer in model.model.layers:
        empty = torch.nn.Parameter(torch.empty(0))
        empty.ds_id = 1
        layer.mlp.experts.down_proj = empty
    report = pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
    (why,) = {each.why for each in report.left if each.part == "experts"}
    assert "ZeRO-3 has taken its weights apart" in why
