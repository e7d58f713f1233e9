"""LoRA on experts, PEFT's `target_parameters`: PEFT's numbers, no copy of a weight, nothing of PEFT's changed."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

pytest.importorskip("transformers", minversion="5.7")
peft = pytest.importorskip("peft", minversion="0.21")

from support.compare import error, same  # noqa: E402
from tiny import NEWER, batch, gradients, tiny  # noqa: E402

import pagestash as ps  # noqa: E402
import pagestash.hf  # noqa: E402
from pagestash.integrations.hf import experts as ours  # noqa: E402
from pagestash.integrations.hf.weights import UPDATES  # noqa: E402
from pagestash.kernels.gemm import grouped  # noqa: E402
from pagestash.moe import projection  # noqa: E402

FAMILIES = ["Qwen3-MoE", "gpt-oss"]  # gpt-oss: transposed, interleaved, with biases
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(seed=3, name="default", model=None, family="Qwen3-MoE", experts="pagestash", dtype=None, **options):
    """A tiny model with adapters on its experts and on attention, the same numbers each time."""
    given = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj"], "target_parameters": EXPERTS} | options
    if model is None:
        made = tiny(family, experts=experts, dtype=dtype or torch.float32)
        model = peft.get_peft_model(made, peft.LoraConfig(**given), adapter_name=name)
    else:
        model.add_adapter(name, peft.LoraConfig(**given))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for at, value in model.named_parameters():
            if "lora_" in at and f".{name}." in at:
                value.copy_(0.2 * torch.randn(value.shape, generator=generator))
    return model


def optimised(**options):
    model = lora(**options)
    report = pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
    assert [each.kind for each in report.replaced].count("ParamWrapper") == 4
    assert report.left == []
    return model


def run(model):
    model.zero_grad()
    output = model(**batch())
    output.loss.backward()
    return output, gradients(model)


def close(got, wanted, tolerance=1e-5):
    (got, found), (wanted, wanted_gradients) = got, wanted
    torch.testing.assert_close(got.logits, wanted.logits, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.loss, wanted.loss, rtol=tolerance, atol=tolerance)
    assert found.keys() == wanted_gradients.keys()
    for name in found:
        torch.testing.assert_close(found[name], wanted_gradients[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("make", [lora, optimised])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3-MoE", {}),
        ("Qwen3-MoE", {"r": 16, "use_rslora": True}),
        ("Qwen3-MoE", {"target_parameters": EXPERTS[1:]}),
        ("gpt-oss", {}),
    ],
    ids=["Qwen3-MoE", "rank 16", "down_proj", "gpt-oss"],
)
def test_logits_loss_and_gradients_are_those_of_peft(family, options, make):
    if make is optimised and "target_parameters" in options:
        make = lora
    wanted = run(lora(family=family, experts="eager", **options))
    assert any("experts" in name and "lora_B" in name for name in wanted[1])
    close(run(make(family=family, **options)), wanted)


@pytest.mark.skipif("Nemotron-H" not in NEWER, reason="this release of transformers has no such model")
def test_adapters_on_experts_without_a_gate_are_taken_too():
    options = {"family": "Nemotron-H", "target_parameters": ["experts.up_proj", "experts.down_proj"]}
    model = lora(**options)
    report = pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
    assert [each.kind for each in report.replaced].count("ParamWrapper") == 2
    assert report.left == []
    got, wanted = run(model), run(lora(experts="eager", **options))
    assert any("experts" in name and "lora_A" in name for name in got[1])
    close(got, wanted)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3-MoE", {"target_modules": "all-linear"}),  # which has the router's weight, too
        ("HunYuan", {}),  # whose router is known by its place
    ],
    ids=["a router with an adapter", "HunYuan"],
)
def test_a_router_beside_adapted_experts_chooses_once(family, options, monkeypatch):
    model = lora(family=family, **options)
    report = pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
    assert [each.part for each in report.replaced].count("router") == 2
    assert [each for each in report.left if each.part == "router"] == []
    wanted = run(model)[1]
    calls, theirs = [], torch.topk
    monkeypatch.setattr(torch, "topk", lambda *args, **options: calls.append(0) or theirs(*args, **options))
    keeper = ps.Keeper(ps.Policy([ps.Rule("model.layers.*", "recompute", min_bytes=0)])).attach(model)
    with keeper.step():
        found = run(model)[1]
    assert len(calls) == 2
    assert same(found, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_near_to_float32_as_peft_is(family):
    exact, exact_gradients = run(lora(family=family, experts="eager"))
    theirs, their_gradients = run(lora(family=family, experts="grouped_mm", dtype=torch.bfloat16))
    got, found = run(optimised(family=family, dtype=torch.bfloat16))
    step = 2**-8
    assert error(got.logits, exact.logits) <= 1.2 * error(theirs.logits, exact.logits) + step
    assert abs(got.loss - theirs.loss) <= 4 * step * theirs.loss
    assert {value.dtype for value in found.values()} == {torch.float32}  # PEFT's adapters are
    exact, theirs, got = (
        torch.cat([each[name].flatten() for name in found])
        for each in (exact_gradients, their_gradients, found)
    )
    assert error(got, exact) <= 1.2 * error(theirs, exact) + step


def test_adapters_on_experts_alone_train_in_the_first_layer_too():
    options = {"target_modules": []}
    got = run(optimised(**options))
    close(got, run(lora(experts="eager", **options)))
    first = [name for name in got[1] if "layers.0" in name]
    assert len(first) == 4


# --- what is saved, and computed ---


def saved_by(module, *inputs):
    """The tensors that autograd keeps of a call, by where they are."""
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor
    ):
        result = module(*inputs)
    return saved, result


def inputs(dtype=torch.bfloat16, tokens=24, width=32):
    torch.manual_seed(0)
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    ids = torch.rand(tokens, 4).argsort(1)[:, :2]
    return x, ids, torch.rand(tokens, 2, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_copy_of_a_weight_is_saved_only_what_the_plain_block_saves(family):
    model = optimised(family=family, dtype=torch.bfloat16)
    experts = model.get_base_model().model.layers[0].mlp.experts
    saved, _ = saved_by(experts, *inputs())
    parameters = {each.untyped_storage().data_ptr() for each in experts.parameters()}
    found = {
        tuple(each.shape) for at, each in saved.items() if at not in parameters and each.is_floating_point()
    }
    plain = tiny(family, experts="pagestash", dtype=torch.bfloat16).model.layers[0].mlp.experts
    saved, _ = saved_by(plain, *inputs())
    parameters = {each.untyped_storage().data_ptr() for each in plain.parameters()}
    wanted = {
        tuple(each.shape) for at, each in saved.items() if at not in parameters and each.is_floating_point()
    }
    assert found == wanted


def test_before_optimize_the_copies_are_of_the_factors_alone():
    model = lora(dtype=torch.bfloat16)
    experts = model.get_base_model().model.layers[0].mlp.experts
    saved, _ = saved_by(experts, *inputs())
    own = {each.untyped_storage().data_ptr() for each in experts.parameters()}
    weights = {tuple(each.shape) for each in experts.get_base_layer().parameters()}
    assert [each for at, each in saved.items() if at not in own and tuple(each.shape) in weights] == []


@pytest.fixture
def products(monkeypatch):
    """The shapes of the products that make a gradient of a matrix: those of two matrices of rows."""
    found = []

    def counted(a, b, bounds, inner=grouped.grouped_mm):
        if b.ndim == 2:
            found.append((a.shape[0], b.shape[1]))
        return inner(a, b, bounds)

    monkeypatch.setattr(grouped, "grouped_mm", counted)
    return found


def test_frozen_weights_get_no_gradient_and_no_product(products):
    model = optimised()
    experts = model.get_base_model().model.layers[0].mlp.experts
    experts(*inputs(torch.float32)).sum().backward()
    padded = projection.ALIGNED
    assert sorted(products) == sorted([(padded, 32), (32, padded), (padded, 16), (32, padded)])


def test_below_frozen_weights_alone_the_tokens_are_not_saved(products):
    experts = tiny("gpt-oss", experts="pagestash").model.layers[0].mlp.experts.requires_grad_(False)
    x, ids, weights = inputs(torch.float32)
    saved, y = saved_by(experts, x, ids, weights)
    assert x.untyped_storage().data_ptr() not in saved
    got = torch.autograd.grad(y.sum(), [x, weights])
    assert products == []
    wanted = ours.grouped_mm_experts_forward(experts, x, ids, weights)
    for a, b in zip(got, torch.autograd.grad(wanted.sum(), [x, weights])):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# --- policies ---

POLICIES = {
    "experts stashed": [("model.layers.*.mlp.experts", "stash")],
    "experts recomputed": [("model.layers.*.mlp.experts", "recompute")],
    "experts offloaded": [("model.layers.*.mlp.experts", "offload")],
    "parts": [("**.moe_act", "stash"), ("**.expert_fc1", "offload")],
    "first projection recomputed": [("**.moe_act", "recompute")],
    "layers recomputed": [("model.layers.*", "recompute")],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_changes_no_bit(policy, family):
    rules = [ps.Rule(*rule, min_bytes=0) for rule in POLICIES[policy]]
    model = optimised(family=family)
    wanted = run(model)
    keeper = ps.Keeper(ps.Policy(rules=rules)).attach(model)
    for _ in range(3):
        with keeper.step():
            got = run(model)
        assert same((got[0].loss, got[1]), (wanted[0].loss, wanted[1]))
    if policy == "experts stashed":  # by the block's own kernels
        assert keeper.reservations > 0
    keeper.detach()
    assert same(run(model)[1], wanted[1])


def test_gradient_checkpointing_changes_no_gradient():
    model = optimised()
    wanted = run(model)[1]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert same(run(model)[1], wanted)


# --- what PEFT does with adapters ---


def test_adapters_trained_with_ours_give_plain_peft_the_same_logits(tmp_path):
    model = optimised()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(3):
        run(model)
        optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny("Qwen3-MoE"), tmp_path).eval()
    with torch.no_grad():
        got, wanted = model.eval()(**batch()).logits, loaded(**batch()).logits
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_trainer_gives_pefts_losses_under_a_policy(tmp_path):
    """With accumulation and an evaluation in between; the adapters that it saves are plain PEFT's."""
    transformers = pytest.importorskip("transformers")
    rows = [torch.randint(3, 96, (11,), generator=torch.Generator().manual_seed(seed)) for seed in range(12)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    rules = [ps.Rule("**.moe_act", "stash", min_bytes=0), ps.Rule("**.self_attn", "offload", min_bytes=0)]
    logs = []
    for name, model in (("plain", lora(experts="eager")), ("kept", optimised())):
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / name), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2,
            gradient_accumulation_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=2,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:4])
        if name == "kept":
            pagestash.hf.wrap(trainer, ps.Policy(rules=rules))
        trainer.train()
        logs.append([each.get("loss", each.get("eval_loss")) for each in trainer.state.log_history[:-1]])
        trainer.save_model(str(tmp_path / name))
    assert logs[1] == pytest.approx(logs[0], rel=1e-3)
    assert len(logs[0]) == 5
    loaded = [
        peft.PeftModel.from_pretrained(tiny("Qwen3-MoE"), tmp_path / name).eval()
        for name in ("plain", "kept")
    ]
    with torch.no_grad():
        wanted, got = (each(**batch()).logits for each in loaded)
    assert error(got, wanted) < 1e-3


def test_several_adapters_at_once_are_summed():
    models = [make(experts=kind) for make, kind in ((lora, "eager"), (optimised, "pagestash"))]
    for model in models:
        lora(seed=4, name="second", model=model, r=2, lora_alpha=3)
        model.base_model.set_adapter(["default", "second"])
    wanted, got = (run(model) for model in models)
    assert any(".second." in name for name in got[1])
    close(got, wanted)


def test_switching_disabling_and_merging_are_pefts():
    theirs, model = lora(experts="eager"), optimised()
    for each in (theirs, model):
        lora(seed=4, name="second", model=each, r=2)
        each.set_adapter("second")
    close(run(model), run(theirs))
    with torch.no_grad(), model.disable_adapter(), theirs.disable_adapter():
        plain = model(**batch()).logits
        torch.testing.assert_close(plain, theirs(**batch()).logits, rtol=1e-5, atol=1e-5)
    for each in (theirs, model):
        each.set_adapter("default")
    wanted = theirs(**batch()).logits
    assert error(plain, wanted) > 0.01
    model.merge_adapter()
    torch.testing.assert_close(model(**batch()).logits, wanted, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    torch.testing.assert_close(model(**batch()).logits, wanted, rtol=1e-4, atol=1e-4)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(**batch()).logits, wanted, rtol=1e-4, atol=1e-4)


def test_evaluation_and_generation_give_pefts_numbers():
    theirs, model = lora(experts="eager").eval(), optimised().eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
    options = {"max_new_tokens": 3, "do_sample": False}
    assert same(model.generate(input_ids=ids, **options), theirs.generate(input_ids=ids, **options))


def test_undo_gives_everything_back():
    model = lora()
    names, state = [name for name, _ in model.named_modules()], list(model.state_dict())
    wrapper = model.get_base_model().model.layers[0].mlp.experts
    attributes = set(wrapper.__dict__)
    report = pagestash.hf.optimize(model)
    assert {each.name for each in report.replaced if each.kind == "ParamWrapper"} == {
        f"model.layers.{i}.mlp.experts{inner}" for i in range(2) for inner in ("", ".base_layer")
    }
    assert list(model.state_dict()) == state
    run(model)
    again = pagestash.hf.optimize(model)
    assert {each.why for each in again.left if each.part == "lora"} == {"optimised already"}
    report.undo()
    assert set(wrapper.__dict__) == attributes
    assert [name for name, _ in model.named_modules()] == names
    assert not wrapper.get_base_layer().__dict__.get(UPDATES)
    close(run(model), run(lora(experts="eager")))


def test_a_copy_of_an_optimised_model_trains_by_itself():
    model = optimised()
    other = copy.deepcopy(model)
    wanted = run(model)[1]
    model.zero_grad()
    assert same(run(other)[1], wanted)
    assert gradients(model) == {}


def test_adapters_that_come_after_optimize_work_and_a_second_call_takes_them():
    model = tiny("Qwen3-MoE", experts="pagestash")
    pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj"], target_parameters=EXPERTS)
    model = peft.get_peft_model(model, config)
    lora_of = lora().state_dict()
    model.load_state_dict(lora_of)
    wanted = run(lora(experts="eager"))
    close(run(model), wanted)
    report = pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
    assert [each.kind for each in report.replaced] == ["ParamWrapper"] * 4 + ["Linear"] * 2
    close(run(model), wanted)


def test_experts_of_another_implementation_keep_pefts_way():
    model = lora(experts="grouped_mm")
    report = pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
    whys = {each.why for each in report.left if each.kind == "ParamWrapper"}
    assert whys == {"experts_implementation is 'grouped_mm'"}
    close(run(model), run(lora(experts="eager")))


def test_what_the_block_cannot_run_is_said_once_under_adapters_too(monkeypatch):
    model = lora()
    experts = model.get_base_model().model.layers[0].mlp.experts.get_base_layer()
    monkeypatch.setattr(ours, "_said", set())
    monkeypatch.setattr(type(experts), "_apply_gate", lambda self, rows: rows.chunk(2, dim=-1)[0].sin())
    with pytest.warns(UserWarning, match="runs Qwen3MoeExperts by transformers' grouped_mm"):
        run(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model)
    report = pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
    assert {each.why for each in report.left if each.part == "lora"} == {
        "Qwen3MoeExperts runs by transformers' grouped_mm"
    }


def test_a_weight_that_something_else_makes_is_said_and_runs():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    experts = tiny("Qwen3-MoE", experts="pagestash").model.layers[0].mlp.experts
    parametrize.register_parametrization(experts, "down_proj", Doubled())
    with pytest.warns(
        UserWarning, match="Doubled makes down_proj of Qwen3MoeExperts, so backward keeps a copy"
    ):
        got = experts(*inputs(torch.float32))
    wanted = ours.grouped_mm_experts_forward(experts, *inputs(torch.float32))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


# --- adapters of linear layers ---


def attention(**options):
    modules = ["q_proj", "v_proj", "o_proj"]
    return lora(dtype=torch.bfloat16, target_parameters=None, target_modules=modules, **options)


def test_adapters_of_linear_layers_keep_no_wide_input_and_are_as_near_to_float32_as_pefts():
    model = attention()
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    x = torch.randn(2, 9, 32, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(2, 9, 32, dtype=torch.bfloat16)
    parameters = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    exact = copy.deepcopy(layer).float()
    exact_x = x.detach().float().requires_grad_()
    y = exact(exact_x)
    inputs = [exact_x, exact.lora_A["default"].weight, exact.lora_B["default"].weight]
    wanted = [y, *torch.autograd.grad(y, inputs, gradient.float())]
    wide, theirs = saved_by(layer, x)
    theirs = [theirs, *torch.autograd.grad(theirs, [x, *parameters], gradient)]
    report = pagestash.hf.optimize(model, experts=False, norm=False, rope=False, attention=False, head=False)
    assert [each.kind for each in report.replaced] == ["Linear"] * 6
    saved, got = saved_by(layer, x)
    got = [got, *torch.autograd.grad(got, [x, *parameters], gradient)]
    for a, b, exact in zip(got, theirs, wanted, strict=True):
        assert a.dtype == b.dtype
        assert error(a, exact) <= error(b, exact) + 2**-8
    own = {each.untyped_storage().data_ptr() for each in (x, *layer.parameters())}
    assert any(each.numel() == x.numel() for at, each in wide.items() if at not in own)
    assert {tuple(each.shape) for at, each in saved.items() if at not in own} == {(18, 4)}


def test_a_model_with_adapters_on_linear_layers_alone_trains_as_with_peft():
    wanted, model = run(attention(experts="grouped_mm")), attention(experts="grouped_mm")
    report = pagestash.hf.optimize(model, experts=False, norm=False, rope=False, attention=False, head=False)
    got = run(model)
    torch.testing.assert_close(got[0].loss, wanted[0].loss, rtol=2**-7, atol=0)
    assert all(error(got[1][name], wanted[1][name]) < 0.05 for name in wanted[1])
    report.undo()
    assert same(run(model)[1], wanted[1])


@pytest.mark.parametrize("options", [{"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}])
def test_adapters_of_linear_layers_that_are_not_plain_stay_pefts(options):
    def seeded(model):
        torch.manual_seed(5)
        return run(model)

    wanted, model = (
        seeded(attention(experts="grouped_mm", **options)),
        attention(experts="grouped_mm", **options),
    )
    pagestash.hf.optimize(model, experts=False, norm=False, rope=False, attention=False, head=False)
    assert same(seeded(model)[1], wanted[1])


# --- quantised weights ---


class Rows8bit(nn.Module):
    """As fused experts are quantised by others: integers, and a parametrization that makes the weight of them."""

    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", scale)
        self.calls = 0

    @torch.no_grad()
    def forward(self, packed):
        self.calls += 1
        return packed * self.scale


def quantise_8bit(experts):
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name).data
        scale = weight.abs().amax(-1, keepdim=True) / 127
        setattr(experts, name, nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False))
        parametrize.register_parametrization(experts, name, Rows8bit(scale), unsafe=True)


def quantise_4bit(experts):
    theirs = pytest.importorskip("bitsandbytes.nn.parametrize")
    for name in ("gate_up_proj", "down_proj"):
        theirs.replace_parameter_4bit(experts, name, blocksize=64)


def ordered(model):
    """The factors of experts by layer and weight: PEFT nests the wrappers of parametrized weights the other way."""
    return sorted(factors(model), key=lambda each: each[0])


def factors(model):
    for name, module in model.named_modules():
        if type(module).__name__ == "ParamWrapper":
            for kind in ("lora_A", "lora_B"):
                layer = int(name.split(".layers.")[1][0])
                yield (layer, module.parameter_name, kind), getattr(module, kind)["default"].weight


@pytest.mark.parametrize("quantise", [quantise_8bit, quantise_4bit])
@pytest.mark.parametrize("family", FAMILIES)
def test_over_quantised_weights_the_packed_ones_alone_are_kept(family, quantise):
    plain, model = tiny(family), tiny(family, experts="pagestash")
    for layer, other in zip(model.model.layers, plain.model.layers):
        quantise(layer.mlp.experts)
        for name in ("gate_up_proj", "down_proj"):  # what the packed ones stand for
            getattr(other.mlp.experts, name).data = getattr(layer.mlp.experts, name).data.clone()
    # Of a parametrized weight PEFT wants the whole name.
    names = [f"model.layers.{layer}.{name}" for layer in range(2) for name in EXPERTS]
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj"], target_parameters=names)
    plain, model = peft.get_peft_model(plain, config), peft.get_peft_model(model, config)
    for (_, one), (_, other) in zip(ordered(plain), ordered(model), strict=True):
        one.data = other.data = 0.2 * torch.randn(one.shape)
    report = pagestash.hf.optimize(model, norm=False, rope=False, attention=False, head=False)
    assert report.left == []
    wanted, _ = run(plain)
    for _ in range(2):
        got, _ = run(model)
        torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-5, atol=1e-5)
        for (name, one), (_, other) in zip(ordered(plain), ordered(model)):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-5, msg=str(name))
    experts = model.get_base_model().model.layers[0].mlp.experts
    saved, _ = saved_by(experts, *inputs(torch.float32))
    own = {each.untyped_storage().data_ptr() for each in (*experts.parameters(), *experts.buffers())}
    numbers = experts.get_base_layer().gate_up_proj.numel() // 2
    assert [
        each for at, each in saved.items() if at not in own and each.numel() >= numbers and each.ndim == 3
    ] == []
    with torch.no_grad():
        evaluated = model.eval()(**batch()).logits
    torch.testing.assert_close(evaluated, wanted.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["float8", "torchao"])
def test_quantised_weights_that_the_block_cannot_read_are_refused_by_name(kind):
    experts = tiny("Qwen3-MoE", experts="pagestash").model.layers[0].mlp.experts
    packed = torch.zeros(4, 32, 32, dtype=torch.float8_e4m3fn)
    if kind == "torchao":
        packed = torch.zeros(4, 32, 32).as_subclass(
            type("Int8Tensor", (torch.Tensor,), {"__module__": "torchao.q"})
        )
    experts.__dict__.pop(ours.HIDDEN, None)
    del experts.gate_up_proj
    experts.gate_up_proj = packed
    named = {"float8": "torch.float8_e4m3fn", "torchao": "Int8Tensor"}[kind]
    assert ours.activation_of(experts) == f"its weights are quantised ({named})"
