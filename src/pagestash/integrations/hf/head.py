"""The head and the loss of a causal language model as one operation, so that no logits are kept.

The model's `forward` stays its own. While it runs with labels in training, `lm_head` computes the loss from the
hidden states that it is given and hands these on in the place of logits; the model's `loss_function` returns the
loss. That is right for a model that takes the loss of its logits and returns them, and does nothing to them before
but what the loss can do, too (`logits.py`), which its source must show. The loss is computed inside `lm_head`,
where FSDP has its weight. Only the call that the model's own `forward` makes, after its body has returned, is
taken: others (of a hook, a copy, another thread) get logits.
"""

import inspect
import threading
import warnings
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import nn

from pagestash.integrations.hf.logits import Step, bend_of, steps_of
from pagestash.integrations.hf.report import MARK, Ran, Report, packages, patched_already
from pagestash.moe.ops import cross_entropy
from pagestash.saved.compiled import at_compile_time
from pagestash.torch_internals import forward_hooks_of


def replace_head(model: Any, report: Report) -> None:
    """Fuse the head and the loss of `model`, a `PreTrainedModel`, if that changes nothing."""
    why = (
        _head_is_new(model)
        or patched_already(model)
        or _why_not(model)
        or _other_loss(model)
        or _hooked(model.lm_head)
    )
    if why is not None:
        report.leave("head", "(the model)", model, why)
        return
    head, state = model.lm_head, _Fusing()
    report.put_forward(model, _model_forward(type(model).forward, state))
    if model.base_model is not model:
        report.on_undo(model.base_model.register_forward_hook(state.body_returned).remove)
    report.put_forward(head, _head_forward(type(head).forward, state))
    report.replace("head", "(the model)", model, "the loss by chunks of logits", state.ran)


def _head_is_new(model: Any) -> str | None:
    """Why a second call cannot fuse the head: the first has fused one that is gone."""
    head = getattr(model, "lm_head", None)
    if MARK not in model.__dict__ or head is None or MARK in head.__dict__:
        return None
    return (
        "its lm_head was replaced after it was optimised; call undo() of the first report, and optimize again"
    )


def _other_loss(model: Any) -> str | None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is ForCausalLMLoss:
        return None
    return "its loss is not the usual one of a causal language model"


@at_compile_time
def _hooked(head: nn.Module) -> str | None:
    """A hook of somebody who may read or change logits. Those of torch (FSDP2) and ours do neither."""
    theirs = [
        hook for hook in forward_hooks_of(head).values() if not packages(hook) <= {"torch", "pagestash"}
    ]
    return "a forward hook on its lm_head is to be given logits" if theirs else None


@at_compile_time
def _warn(why: str) -> None:
    warnings.warn(f"pagestash.hf does not fuse the head and the loss: {why}", stacklevel=3)


def _why_not(model: Any) -> str | None:
    head = getattr(model, "lm_head", None)
    if head is None:
        return "it has no lm_head"
    # FSDP makes a subclass of a class that it shards.
    if (
        not isinstance(head, nn.Linear)
        or type(head).forward is not nn.Linear.forward
        or head.bias is not None
    ):
        return f"its lm_head is {type(head).__name__}, not a linear layer without bias"
    if (already := patched_already(head)) is not None:
        return f"lm_head: {already}"
    steps = steps_of(type(model).forward)
    if steps is None:
        return "its forward does something to logits, or with them, that the loss by chunks does not"
    if bend_of(model, steps).scale == 0:
        return "its forward multiplies its logits by 0"
    return None


@dataclass(slots=True, eq=False)
class _Call:
    """One forward of a model with labels: what it hands to its head, and from there to its loss function."""

    model: Any
    labels: torch.Tensor
    options: dict[str, Any]
    steps: list[Step]
    """What the model does to its logits; what it does to that which stands in their place is for nothing."""
    ready: bool
    """Whether the model's body has returned: what `lm_head` is given next are the last hidden states."""
    hidden: torch.Tensor | None = None
    loss: torch.Tensor | None = None

    def compute(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As `ForCausalLMLoss` does it with logits."""
        ignore = self.options.get("ignore_index", -100)
        count = self.options.get("num_items_in_batch")
        shifted = self.options.get("shift_labels")
        if shifted is None:
            shifted = nn.functional.pad(self.labels, (0, 1), value=ignore)[..., 1:]
        device = hidden.device.type
        if torch.is_autocast_enabled(device):  # as it would cast for a linear layer
            dtype = torch.get_autocast_dtype(device)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        bend = bend_of(self.model, self.steps)
        with torch.autocast(device, enabled=False):
            loss = cross_entropy(
                hidden,
                weight,
                shifted.to(hidden.device),
                ignore_index=ignore,
                logit_scale=bend.scale,
                soft_cap=bend.cap,
                reduction="mean" if count is None else "sum",
            )
        if isinstance(count, torch.Tensor):
            count = count.to(loss.device)
        return loss if count is None else loss / count


class _Fusing:
    """The forwards that run now, by thread. (A compiler follows none of this but in one thread.)"""

    def __init__(self) -> None:
        self._calls: dict[int, list[_Call]] = {}
        self.ran = Ran()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Fusing":
        """As functions are copied, which the forwards are: a copy of the model has the same hooks."""
        return self

    def begin(self, call: _Call) -> bool:
        """Whether `call` may be fused: not while another thread runs the same model."""
        mine = _thread()
        if any(each.model is call.model for key in self._calls if key != mine for each in self._calls[key]):
            return False
        self._calls.setdefault(mine, []).append(call)
        return True

    def end(self) -> None:
        calls = self._calls[_thread()]
        calls.pop()
        if not calls:
            del self._calls[_thread()]

    def innermost(self) -> _Call | None:
        calls = self._calls.get(_thread())
        return calls[-1] if calls else None

    def body_returned(self, body: nn.Module, *_: Any) -> None:
        """A hook after the forward of a model's body."""
        call = self.innermost()
        if call is not None and call.model.base_model is body:
            call.ready = True

    def loss_function(self, logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """In the place of the model's: the loss that `lm_head` has computed."""
        call = self.innermost()
        if call is None or call.hidden is None:  # another thread's call, that nobody fused
            from transformers.loss.loss_utils import ForCausalLMLoss

            return ForCausalLMLoss(logits, *args, **options)
        if (logits is not call.hidden and not call.steps) or call.loss is None:
            raise RuntimeError(
                "pagestash.hf: the model did something to the logits before their loss; "
                "optimize(model, head=False) leaves its head alone"
            )
        return call.loss


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _head_forward(theirs: Any, state: _Fusing) -> Any:
    def forward(self: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        call = state.innermost()
        if call is None or not call.ready or call.hidden is not None or call.model.lm_head is not self:
            return theirs(self, hidden)
        call.loss, call.hidden = call.compute(hidden, self.weight), hidden
        state.ran.yes = True
        return hidden

    return forward


def _model_forward(theirs: Any, state: _Fusing) -> Any:
    signature, steps = inspect.signature(theirs), steps_of(theirs) or []

    def fuses(model: Any, given: dict[str, Any], skip: bool) -> bool:
        """Whether this call's loss is the one that we compute, and its logits are not asked for."""
        keep = given.get("logits_to_keep", 0)
        if not (skip and given.get("labels") is not None and isinstance(keep, int) and keep == 0):
            return False
        if model.__dict__.get("_loss_function") == state.loss_function:
            return False  # a call within another, or beside it
        why = _head_is_new(model) or _other_loss(model) or _hooked(model.lm_head)
        if why is not None:
            _warn(why)
        return why is None

    @wraps(theirs)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        skip = options.pop("skip_logits", self.training)
        given = signature.bind(self, *args, **options).arguments
        if not fuses(self, given, skip):
            return theirs(self, *args, **options)
        asked = options.pop("return_dict", None)
        as_tuple = not (self.config.return_dict if asked is None else asked)
        call = _Call(self, given["labels"], options, steps, ready=self.base_model is self)
        if not state.begin(call):
            return theirs(self, *args, **options, return_dict=not as_tuple)
        before = self.__dict__.get("_loss_function")
        self._loss_function = state.loss_function
        try:
            output = theirs(self, *args, **options, return_dict=True)
        finally:
            state.end()
            if before is None:
                del self._loss_function
            else:
                self._loss_function = before
        if call.hidden is not None:  # which stands where logits would
            output = replace(output, logits=None)
        return output.to_tuple() if as_tuple else output

    forward.__module__ = __name__
    return forward
