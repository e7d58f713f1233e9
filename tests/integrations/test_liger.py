"""Beside Liger: what it has replaced stays, and the report says so; experts that it takes from us are refused."""

import pytest

transformers = pytest.importorskip("transformers", minversion="5.7")
liger = pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="Liger is not installed")

from tiny import as_it_is, tiny  # noqa: E402
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: E402

import pagestash as ps  # noqa: E402
import pagestash.hf  # noqa: E402

TAKEN = "(its swiglu), so experts_implementation='pagestash' has no effect; leave it off with swiglu=False"


@pytest.fixture(autouse=True)
def classes():
    """Liger writes over names in the file of the model, for all models of the process."""
    before, forward = dict(vars(modeling_qwen3_moe)), modeling_qwen3_moe.Qwen3MoeForCausalLM.forward
    yield
    vars(modeling_qwen3_moe).update(before)
    modeling_qwen3_moe.Qwen3MoeForCausalLM.forward = forward


def said(report):
    return {(each.part, each.why.partition(", in a Trainer")[0]) for each in report.left}


def replaced(report):
    return {each.part for each in report.replaced}


def forwards(model):
    """Which modules have a `forward` of their own, and the parts of all."""
    return [(name, module.__dict__.get("forward")) for name, module in model.named_modules()]


@pytest.mark.parametrize("swiglu", [True, False])
def test_an_instance_that_liger_patched_keeps_its_parts(swiglu):
    model = tiny("Qwen3-MoE", experts="pagestash")
    liger._apply_liger_kernel_to_instance(model, swiglu=swiglu)
    before = forwards(model)
    report = pagestash.hf.optimize(model)
    experts = {("experts", f"Liger has replaced its forward {TAKEN}")} if swiglu else set()
    assert said(report) == experts | {
        ("norm", "Liger has replaced its forward"),
        ("rope", "Liger has replaced apply_rotary_pos_emb"),
        ("head", "Liger has replaced its forward"),
    }
    assert replaced(report) - {"router"} == {"attention", "masks"} | (set() if swiglu else {"experts"})
    report.undo()
    assert forwards(model) == before


def test_a_model_of_classes_that_liger_patched_keeps_them():
    liger.apply_liger_kernel_to_qwen3_moe()
    report = pagestash.hf.optimize(tiny("Qwen3-MoE", experts="pagestash"))
    assert said(report) == {
        ("experts", f"Liger has replaced its class {TAKEN}"),
        ("norm", "Liger has replaced its class"),
        ("rope", "Liger has replaced apply_rotary_pos_emb"),
        ("head", "Liger has replaced its class's forward"),
    }


def test_undo_leaves_what_liger_put_over_ours():
    model = tiny("Qwen3-MoE", experts="pagestash")
    report = pagestash.hf.optimize(model)
    liger._apply_liger_kernel_to_instance(model, swiglu=False)
    theirs = {name: forward for name, forward in forwards(model) if "norm" in name or not name}
    again = pagestash.hf.optimize(model)
    assert again.replaced == []
    assert ("head", "Liger has replaced its forward") in said(again)
    report.undo()
    assert {name: forward for name, forward in forwards(model) if forward} == theirs


def trainer_of(model, folder, **settings):
    args = transformers.TrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True, **settings)
    return transformers.Trainer(model=model, args=args, train_dataset=[])


@pytest.mark.parametrize("by", ["instance", "class", "trainer"])
def test_wrap_refuses_experts_that_ligers_swiglu_takes(tmp_path, by):
    if by == "class":
        liger.apply_liger_kernel_to_qwen3_moe(rope=False, fused_linear_cross_entropy=False, rms_norm=False)
    model = tiny("Qwen3-MoE", experts="pagestash")
    if by == "instance":
        liger._apply_liger_kernel_to_instance(model)
    trainer = trainer_of(model, tmp_path, use_liger_kernel=by == "trainer")
    before = set(trainer.__dict__), as_it_is(model)[0]
    said = r"^wrap: .*model\.layers\.0\.mlp\.experts.*swiglu.*liger_kernel_config=\{'swiglu': False\}$"
    with pytest.raises(ValueError, match=said):
        pagestash.hf.wrap(trainer, ps.Policy([ps.Rule("model.layers.*.mlp.experts", "stash")]))
    assert (set(trainer.__dict__), as_it_is(model)[0]) == before


def test_wrap_takes_a_trainer_whose_liger_leaves_the_experts(tmp_path):
    model = tiny("Qwen3-MoE", experts="pagestash")
    settings = {"use_liger_kernel": True, "liger_kernel_config": {"swiglu": False}}
    pagestash.hf.wrap(
        trainer_of(model, tmp_path, **settings), ps.Policy([ps.Rule("model.layers.*.mlp.experts", "stash")])
    )
