"""Our expert block behind transformers' experts registry, under the name `"pagestash"`.

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="pagestash")

The registry hands each call a module of any model, tokens [T, d], chosen experts [T, K] and their weights [T, K].
What the block cannot run (`layouts.py` decides) goes to transformers' `grouped_mm`, and a warning says so once for
each class; without gradients (evaluation, `generate`) all of it does. An id that is no expert's (transformers marks
the choices of other ranks so) costs no row.

Saved for backward in bf16: `2·T·d + 4·T·K·n` bytes, indices and weights; without a gate, `2·T·d + 2·T·K·n`. Rules
can name the module, and in it `expert_fc1`, `moe_act` and `expert_fc2`, as in `pagestash.moe`, once
`optimize(model)` has put them there.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from pagestash.integrations.hf.layouts import activation_of, first_projection
from pagestash.integrations.hf.report import Ran, Report, is_liger, patched_already
from pagestash.integrations.hf.weights import UPDATES, weight_of
from pagestash.kernels.gemm.products import described
from pagestash.kernels.moe.activation import Activation
from pagestash.moe.config import MoEConfig
from pagestash.moe.experts import Experts
from pagestash.moe.parts import ROWS_OF_OTHERS, MoEAct
from pagestash.moe.projection import Weight

NAME = "pagestash"
PARTS = ("expert_fc1", "moe_act", "expert_fc2")
HIDDEN = "_pagestash_experts"
"""The attribute of a module of transformers that has what runs it. It is no child: it has no name of its own."""

READ_AS_FLOAT32 = (torch.bfloat16, torch.float16)
"""Weights that the kernels widen as they read them, to what a copy in float32 would be. A dispatch sends a copy."""

AROUND = ("transformers.distributed.", "pagestash.integrations.hf.expert_parallel")
"""Whose forwards, on a module of experts, do what expert parallelism needs around the module's own."""


def register() -> None:
    """Make the implementation known to transformers, in this process."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS as QUANTISED
    except ImportError:  # no such experts in this version
        return
    QUANTISED.register(NAME, _quantised_forward)


def _quantised_forward(self: nn.Module, *arguments: Any) -> torch.Tensor:
    """What transformers calls for experts in FP8, which have a registry of their own: its own function."""
    from transformers.integrations.finegrained_fp8 import fp8_grouped_mm_experts_forward

    _say_once(self)
    return fp8_grouped_mm_experts_forward(self, *arguments)


def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls in the place of `self.forward`."""
    runs = runs_now(self)
    if runs is None:
        if torch.is_grad_enabled():
            _say_once(self)
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    self.__dict__[HIDDEN].ran.yes = True
    device, dtype = hidden_states.device.type, hidden_states.dtype
    x = hidden_states
    without_autocast: AbstractContextManager[Any] = nullcontext()
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
        without_autocast = torch.autocast(device, enabled=False)
    if runs.over_capacity.device != x.device:
        runs.to(x.device)
    weights = top_k_weights
    if weights.dtype not in READ_AS_FLOAT32 or runs.dispatch is not None:
        weights = weights.float()
    with without_autocast:
        # (Not by a call of the module, which has no hooks: nobody else can reach it.)
        y = runs.forward(x.contiguous(), weights, top_k_index)
    return y if y.dtype == dtype else y.to(dtype)


def runs_now(module: nn.Module) -> Experts | None:
    """What runs `module` in a call; None where transformers' grouped_mm does."""
    # Without gradients, too, where adapters leave their update to the block.
    return runs_of(module) if torch.is_grad_enabled() or module.__dict__.get(UPDATES) else None


def runs_of(module: Any) -> Experts | None:
    """What runs `module`, made where it is met first; None where our block cannot."""
    if HIDDEN not in module.__dict__:
        found = activation_of(module)
        module.__dict__[HIDDEN] = _Hidden() if isinstance(found, str) else _hidden(module, found)
    runs: Experts | None = module.__dict__[HIDDEN].runs
    if runs is not None and runs.config.experts != module.num_experts:
        raise RuntimeError(
            f"{type(module).__name__} has {module.num_experts} experts, and had {runs.config.experts} when it ran "
            "first: set up expert parallelism before the first forward and before optimize(model)"
        )
    return runs


@dataclass(slots=True, eq=False)
class _Hidden:
    """What a module of transformers has of ours: what runs it, if anything, and the parts that rules can name."""

    runs: Experts | None = None
    parts: tuple[nn.Module, ...] = ()
    ran: Ran = field(default_factory=Ran)


def _hidden(module: Any, activation: Activation) -> _Hidden:
    up, down = ExpertWeights(module, first_projection(module)), ExpertWeights(module, "down_proj")
    with torch.no_grad():
        up_EHD, down_EDN = up().matrices(), down().matrices()
    config = MoEConfig(
        width=up_EHD.shape[2],
        expert_width=down_EDN.shape[2],
        experts=module.num_experts,
        top_k=1,  # of no use here: the router is the model's
        activation=activation,
        bias=module.has_bias,
    )
    parts: Any = (up, MoEAct(), down)
    return _Hidden(
        Experts(config, parts, interleaved=not module.is_concatenated, device=up_EHD.device), parts
    )


class ExpertWeights(MoEAct):
    """A projection of a module of transformers: calling it gives what the block multiplies with.

    Like `MoEAct` it has no parameters of its own, and sees to its saved tensor where a keeper asks for it.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self._owner = (owner,)  # in a tuple, where it is no child
        self._name = name

    def use_recompute(self, on: bool) -> None:
        """Nothing more than is done anyway; refused where the rows came from other ranks."""
        if on and self._name != "down_proj" and hasattr(self._owner[0].__dict__.get("forward"), "wired"):
            raise ValueError(ROWS_OF_OTHERS)
        super().use_recompute(on)

    def forward(self) -> Weight:
        owner: Any = self._owner[0]
        bias = getattr(owner, f"{self._name}_bias") if owner.has_bias else None
        return weight_of(owner, self._name, bias)


# --- what our block cannot run ---

_said: set[type] = set()


def _say_once(module: nn.Module) -> None:
    kind = type_before_parametrizations(module)  # PEFT makes another class for each forward
    if kind not in _said:
        _said.add(kind)
        why = activation_of(module)
        warnings.warn(f"pagestash runs {kind.__name__} by transformers' grouped_mm: {why}", stacklevel=3)


# --- names for rules ---


def implementation(module: Any) -> str | None:
    """The name by which transformers looks up who runs the experts."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def is_experts(module: nn.Module) -> bool:
    """Whether transformers asks its registry who runs `module`."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_concatenated")


def taken(module: nn.Module) -> str | None:
    """Why `module`, experts that transformers' registry would run, does not come to it: another library has it."""
    kind = type(module)
    if not is_experts(module) and not (is_liger(kind) and kind.__name__.endswith("Experts")):
        return None
    put_by = getattr(module.__dict__.get("forward"), "__module__", None) or ""
    if put_by.startswith(AROUND) and not is_liger(kind):
        return None
    why = patched_already(module)
    if why is not None and why.startswith("Liger"):
        why += (
            f" (its swiglu), so experts_implementation={NAME!r} has no effect; leave it off with swiglu=False, "
            "in a Trainer with liger_kernel_config={'swiglu': False}"
        )
    return why


def name_experts(model: Any, modules: list[tuple[str, nn.Module]], report: Report) -> None:
    """Give the experts of `model`, among its `modules`, that are ours to run the parts that rules can name."""
    found = [(name, module) for name, module in modules if is_experts(module) or taken(module)]
    if not found and implementation(model) == NAME:
        # transformers takes the name for any model, and asks nobody where the class knows no registry.
        others = [each for each in modules if type(each[1]).__name__.endswith("Experts")]
        for name, module in others:
            report.leave("experts", name, module, _why_nobody_asks(module))
        if not others:
            nobody_asks = "none of its modules lets another implementation run it"
            report.leave("experts", "(the model)", model, nobody_asks)
    for name, module in found:
        chosen = implementation(module) or implementation(model)
        if chosen != NAME:
            how = f"experts_implementation is {chosen!r}; model.set_experts_implementation({NAME!r}) makes it ours"
            report.leave("experts", name, module, how)
        elif (why := taken(module)) is not None:
            report.leave("experts", name, module, why)
        elif getattr(getattr(module, "down_proj", None), "ndim", 3) != 3:
            report.leave("experts", name, module, _why_flat(module.down_proj))
        elif runs_of(module) is None:
            report.leave("experts", name, module, str(activation_of(module)))
        elif hasattr(module, PARTS[0]):
            report.leave("experts", name, module, "optimised already")
        else:
            _add_parts(module)
            report.on_undo(partial(_remove_parts, module))
            by = f"the expert block, products by {_multiplied_by(module)}"
            report.replace("experts", name, module, by, module.__dict__[HIDDEN].ran)


def _why_flat(weight: Any) -> str:
    """Who has the weights of experts in another shape, and what to do."""
    if hasattr(weight, "ds_id"):
        return (
            "DeepSpeed's ZeRO-3 has taken its weights apart; make the model without deepspeed.zero.Init, and call "
            "optimize(model) before deepspeed.initialize"
        )
    return "FSDP has flattened its weights; call optimize(model) before the model is wrapped"


def _multiplied_by(module: nn.Module) -> str:
    weight = next(module.parameters())
    return described(weight.device, weight.dtype if weight.is_floating_point() else torch.bfloat16)


def _why_nobody_asks(module: nn.Module) -> str:
    """Why transformers has its own code, and nothing else, for what its name says are experts."""
    if type(module).__name__ == "Llama4TextExperts":
        return "Llama-4 runs every expert on every token, scaled by its scores: there is no choice to follow"
    packed = next((each.dtype for each in module.parameters() if not each.is_floating_point()), None)
    quantised = "" if packed is None else f"its weights are quantised ({packed}), and "
    return f"{quantised}transformers lets no other implementation run it"


def _add_parts(module: Any) -> None:
    runs = module.__dict__[HIDDEN].runs
    for name, part in zip(PARTS, module.__dict__[HIDDEN].parts):
        module.add_module(name, part)
    # A keeper asks these of the module that a rule names.
    module.use_pool, module.use_recompute, module.use_half = runs.use_pool, runs.use_recompute, runs.use_half


def _remove_parts(module: Any) -> None:
    # A keeper that is still attached cannot ask for this any more.
    module.use_pool(None, 0)
    module.use_recompute(False)
    for name in PARTS:
        delattr(module, name)
    for name in ("use_pool", "use_recompute", "use_half"):
        del module.__dict__[name]
