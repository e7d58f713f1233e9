"""What a causal language model does to its logits before their loss, read from the source of its `forward`.

Known are steps of the forms below, from the one call of `self.lm_head` on; `E` is an attribute of the model or of
what it has (`self.config.logits_scaling`). Whatever else happens to `logits` is unknown, but for the loss and the
output.

    logits = self.lm_head(...)          logits = logits / E         if E is not None:
    logits = self.lm_head(...) * E      logits = logits * E             (steps)
    .float(), .to(...), .contiguous()   logits = torch.tanh(logits)
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import reduce
from typing import Any, Literal, NamedTuple

KEEP = ("float", "to", "contiguous")
"""Methods that change no value beyond its rounding: the loss is in float32 anyway."""


class Step(NamedTuple):
    """One thing done to the logits."""

    kind: Literal["product", "quotient", "tanh", "cast"]
    by: tuple[str, ...] = ()
    """The attribute that they are multiplied with or divided by, from the model on."""
    unless_none: tuple[str, ...] = ()
    """An attribute without which the step is left out; empty: it never is."""


class Bend(NamedTuple):
    """`cap * tanh(scale * logits / cap)`, or `scale * logits` without a cap."""

    scale: float = 1.0
    cap: float | None = None


def steps_of(forward: Any) -> list[Step] | None:
    """What `forward` does to its logits before it takes their loss and returns them; None: something unknown."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or "can_return_tuple" not in map(
        ast.unparse, function.decorator_list
    ):
        return None
    steps: list[Step] = []
    fine: set[int] = set()
    made = 0
    for value, unless_none in _assigned(function.body, ()):
        found = _read(value)
        if found is None:
            return None
        from_head, kinds = found
        made += from_head
        if made != 1 or (from_head and (steps or unless_none)):  # the head comes first, in any case, and once
            return None
        steps += [step._replace(unless_none=unless_none) for step in kinds]
        fine.update(id(node) for node in ast.walk(value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_logits(node.targets[0]):
            fine.add(id(node.targets[0]))
        elif isinstance(node, ast.Call) and _attribute(node.func) == ("loss_function",):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            fine.update(id(each) for each in given if _is_logits(each))
        elif isinstance(node, ast.keyword) and node.arg == "logits" and _is_logits(node.value):
            fine.add(id(node.value))
    uses = [node for node in ast.walk(tree) if _is_logits(node)]
    if made != 1 or any(id(use) not in fine for use in uses) or sum(s.kind == "tanh" for s in steps) > 1:
        return None
    return steps


def bend_of(model: Any, steps: list[Step]) -> Bend:
    """What `steps` come to for `model`, as it is configured now."""
    factor, inner = 1.0, None
    for step in steps:
        if step.unless_none and _value(model, step.unless_none) is None:
            continue
        if step.kind == "product":
            factor *= float(_value(model, step.by))
        elif step.kind == "quotient":
            factor /= float(_value(model, step.by))
        elif step.kind == "tanh":
            inner, factor = factor, 1.0
    return Bend(factor) if inner is None else Bend(inner * factor, factor)


def _value(model: Any, names: tuple[str, ...]) -> Any:
    return reduce(getattr, names, model)


def _assigned(
    body: list[ast.stmt], unless_none: tuple[str, ...]
) -> Iterator[tuple[ast.expr, tuple[str, ...]]]:
    """What `logits` is set to, in order, and below which condition."""
    for statement in body:
        if isinstance(statement, ast.Assign) and _is_logits(statement.targets[0]):
            yield statement.value, unless_none
        elif isinstance(statement, ast.If) and not statement.orelse:
            test = statement.test
            known = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)
            names = _attribute(test.left) if known and isinstance(test, ast.Compare) else None
            if names is not None:
                yield from _assigned(statement.body, names)


def _read(value: ast.expr) -> tuple[bool, list[Step]] | None:
    """Whether `value` is from the head (else from `logits`), and the steps from there; None: unknown."""
    if _is_logits(value):
        return False, []
    if isinstance(value, ast.Call) and _attribute(value.func) == ("lm_head",):
        return True, []
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if ast.unparse(value.func) == "torch.tanh" and len(value.args) == 1:
            found = _read(value.args[0])
            return None if found is None else (found[0], [*found[1], Step("tanh")])
        found = _read(value.func.value) if value.func.attr in KEEP else None
        return None if found is None else (found[0], [*found[1], Step("cast")])
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
        found, by = _read(value.left), _attribute(value.right)
        if found is None or by is None:
            return None
        return found[0], [*found[1], Step("product" if isinstance(value.op, ast.Mult) else "quotient", by)]
    return None


def _is_logits(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "logits"


def _attribute(node: ast.AST) -> tuple[str, ...] | None:
    """`("config", "x")` of `self.config.x`."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return tuple(names) if names and isinstance(node, ast.Name) and node.id == "self" else None
