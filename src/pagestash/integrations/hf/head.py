"""The head and the loss of a causal language model as one operation, so that no logits are kept.

The model's `forward` stays its own. While it runs with labels in training, `lm_head` computes the loss from the
hidden states that it is given and hands these on in the place of logits; the model's `loss_function` returns the
loss. That is right for a model that does nothing to its logits but take their loss and return them, which its
source must show. The loss is computed inside `lm_head`, where FSDP has its weight.
"""

import ast
import inspect
import textwrap
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import nn

from pagestash.integrations.hf.report import Report, patched_already
from pagestash.moe.ops import cross_entropy


def replace_head(model: Any, report: Report) -> None:
    """Fuse the head and the loss of `model`, a `PreTrainedModel`, if that changes nothing."""
    why = patched_already(model) or _why_not(model)
    if why is not None:
        report.leave("head", "(the model)", model, why)
        return
    head, state = model.lm_head, _Fusing()
    report.put_forward(model, _model_forward(type(model).forward, state), state.off)
    report.put_forward(head, _head_forward(type(head).forward, state), state.off)
    report.replace("head", "(the model)", model, "the loss by chunks of logits")


def _why_not(model: Any) -> str | None:
    from transformers.loss.loss_utils import ForCausalLMLoss

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
    if model.loss_function is not ForCausalLMLoss:
        return "its loss is not the usual one of a causal language model"
    if not _only_takes_the_loss(type(model).forward):
        return "its forward does more with logits than take their loss"
    return None


def _only_takes_the_loss(forward: Any) -> bool:
    """Whether `logits` are what `self.lm_head` gives, and go to `self.loss_function` and into the output alone."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return False
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or "can_return_tuple" not in map(
        ast.unparse, function.decorator_list
    ):
        return False
    made = 0
    fine: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _stores_logits(node):
            if not (isinstance(node.value, ast.Call) and _is_self(node.value.func, "lm_head")):
                return False
            made += 1
            fine.add(id(node.targets[0]))
        elif isinstance(node, ast.Call) and _is_self(node.func, "loss_function"):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            fine.update(id(each) for each in given if _is_logits(each))
        elif isinstance(node, ast.keyword) and node.arg == "logits" and _is_logits(node.value):
            fine.add(id(node.value))
    uses = [node for node in ast.walk(tree) if _is_logits(node)]
    return made == 1 and all(id(use) in fine for use in uses)


def _stores_logits(node: ast.Assign) -> bool:
    return len(node.targets) == 1 and _is_logits(node.targets[0])


def _is_logits(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "logits"


def _is_self(node: ast.AST, attribute: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


class _Fusing:
    """What one forward with labels hands from the model to its head and from there to its loss function."""

    def __init__(self) -> None:
        self.labels: torch.Tensor | None = None
        self.options: dict[str, Any] = {}
        self.hidden: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        self.on = True

    def off(self) -> None:
        self.on = False

    def forget(self) -> None:
        self.labels = self.hidden = self.loss = None
        self.options = {}

    def loss_function(self, logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """In the place of the model's: the loss that `lm_head` has computed."""
        if logits is not self.hidden or self.loss is None:
            raise RuntimeError(
                "pagestash.hf: the model did something to the logits before their loss; "
                "optimize(model, head=False) leaves its head alone"
            )
        return self.loss

    def compute(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As `ForCausalLMLoss` does it with logits."""
        assert self.labels is not None
        ignore = self.options.get("ignore_index", -100)
        count = self.options.get("num_items_in_batch")
        shifted = self.options.get("shift_labels")
        if shifted is None:
            shifted = nn.functional.pad(self.labels, (0, 1), value=ignore)[..., 1:]
        device = hidden.device.type
        if torch.is_autocast_enabled(device):  # as it would cast for a linear layer
            dtype = torch.get_autocast_dtype(device)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        with torch.autocast(device, enabled=False):
            loss = cross_entropy(
                hidden,
                weight,
                shifted.to(hidden.device),
                ignore_index=ignore,
                reduction="mean" if count is None else "sum",
            )
        if isinstance(count, torch.Tensor):
            count = count.to(loss.device)
        return loss if count is None else loss / count


def _head_forward(theirs: Any, state: _Fusing) -> Any:
    def forward(self: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        if state.labels is None:
            return theirs(self, hidden)
        state.loss, state.hidden = state.compute(hidden, self.weight), hidden
        return hidden

    return forward


def _model_forward(theirs: Any, state: _Fusing) -> Any:
    signature = inspect.signature(theirs)

    @wraps(theirs)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        skip = options.pop("skip_logits", self.training)
        given = signature.bind(self, *args, **options).arguments
        keep, labels = given.get("logits_to_keep", 0), given.get("labels")
        if labels is None or not skip or not state.on or not isinstance(keep, int) or keep != 0:
            return theirs(self, *args, **options)
        as_tuple = not options.pop("return_dict", self.config.return_dict)
        before = self.__dict__.get("_loss_function")
        state.labels, state.options = labels, options
        self._loss_function = state.loss_function
        try:
            output = theirs(self, *args, **options, return_dict=True)
        finally:
            state.forget()
            if before is None:
                del self._loss_function
            else:
                self._loss_function = before
        output = replace(output, logits=None)
        return output.to_tuple() if as_tuple else output

    forward.__module__ = __name__
    return forward
