"""`optimize`: our kernels in the place of a model's norms, rotary embedding, head and loss."""

from typing import Any

from torch import nn

from pagestash.integrations.hf.attention import refuse_padding_in_graphs, replace_attention
from pagestash.integrations.hf.experts import name_experts
from pagestash.integrations.hf.head import replace_head
from pagestash.integrations.hf.lora import take_adapters
from pagestash.integrations.hf.lora_linear import take_linear_adapters
from pagestash.integrations.hf.masks import replace_masks
from pagestash.integrations.hf.norms import replace_norms
from pagestash.integrations.hf.report import Report
from pagestash.integrations.hf.router import route_once
from pagestash.saved.names import plain_names


def optimize(
    model: nn.Module,
    *,
    experts: bool = True,
    lora: bool = True,
    norm: bool = True,
    rope: bool = True,
    attention: bool = True,
    head: bool = True,
) -> Report:
    """Run the norms, the rotary embedding and the head of `model`, of transformers, by kernels of ours.

        report = pagestash.hf.optimize(model)
        print(report)                           # what was replaced, what was left alone and why
        report.undo()                           # everything as it was

    Experts that run by `experts_implementation="pagestash"` get parts that rules can name: `expert_fc1`,
    `moe_act`, `expert_fc2`. With another implementation they are left as they are, and the report says so.
    Routers choose once, also where a layer is recomputed; the report names layers whose router was not found.
    With LoRA on them (PEFT's `target_parameters`), the sum of weight and update is not formed, and adapters of
    linear layers keep no float32 copy of their input.
    Attention gets a part `core_attn`: what queries, keys and values leave behind. Without a mask and positions
    from the caller, masks are made without a wait for the device.

    Only this model's modules change, never their classes. What another library has replaced before stays. In
    training with labels the output's `logits` are None, for they are never there as a whole: call the model
    with `skip_logits=False`, or in evaluation, to have them.
    """
    causal = transformers_model(model)
    if causal is None:
        raise ValueError(
            f"optimize: {type(model).__name__} is no model of transformers, and holds none; nothing was changed"
        )
    modules = list(plain_names(model))
    report = Report()
    try:
        if experts:
            name_experts(causal, modules, report)
            route_once(modules, report)
        if lora:
            take_adapters(modules, report)
            take_linear_adapters(modules, report)
        if norm:
            replace_norms(modules, report)
        if rope or attention:
            replace_attention(modules, report, rope=rope, core=attention)
        if any(each.part == "attention" for each in report.replaced):
            refuse_padding_in_graphs(causal, report)
        if head:
            replace_head(causal, report)
        if attention:
            replace_masks(modules, report)
    except BaseException:
        report.undo()
        raise
    return report


def transformers_model(model: Any) -> Any:
    """The outermost `PreTrainedModel` of `model`, which may be it; None if there is none."""
    from transformers import PreTrainedModel

    if not isinstance(model, nn.Module):
        return None
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
