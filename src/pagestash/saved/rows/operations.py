"""Which operations work row by row: what they make of a marked buffer is marked, and they may read cut tensors.

An operation is row-wise when row `i` of its result depends on row `i` of its operands alone, and so does its
backward. Each operand must be a marked buffer with the rows in the same dimension, or broadcast over the rows, or
be the right side of a product. A buffer of as many rows without a mark is none of these: `x * mask` makes zeros
of garbage, and what is computed from zeros may well matter.

What was cut comes back as zero, where the gradient is zero, too. A backward that divides by a saved tensor would
find 0 / 0 there, so such operands are saved whole (`divisors`); an operation that divides by its own result, as
`sqrt` does, is not in the table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pagestash.saved.compiled import hidden
from pagestash.saved.rows.marks import Effect, Marks
from pagestash.saved.storage import plain_storage
from pagestash.torch_internals import (
    TorchDispatchMode,
    dispatch_depth,
    dispatch_modes,
    next_sequence_number,
    operators,
    pop_dispatch_mode,
    push_dispatch_mode,
)

Find = Callable[[torch.Tensor], Any]
EffectOf = Callable[[Find, tuple[Any, ...], dict[str, Any]], Effect | None]


class RowWise(TorchDispatchMode):
    """Sees every operation of a region below autograd, before it saves its results, and hands marks on."""

    supports_higher_order_operators = True

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self.marks = marks

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled is one unknown operation

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # asking would load all of dynamo

    @hidden
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        marks = self.marks
        if marks.paused or func in VIEWS or getattr(func, "is_view", False):
            return func(*args, **kwargs)
        operands = _tensors((*args, *kwargs.values()))
        keys = {key for key in map(plain_storage, operands) if key is not None}
        known = OPERATIONS.get(func, _UNKNOWN)
        effect = None if known.rule is None else known.rule(marks.find, args, kwargs)
        has_node = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
        number = next_sequence_number() if has_node else None
        marks.settle(set() if known.node is None else keys, effect, number)
        result = func(*args, **kwargs)
        if effect is not None and effect.ends is not None:
            marks.ignores_the_rest(args[0])
        if effect is not None and known.in_place:
            marks.changed(args[0], effect)
        elif effect is not None:
            marks.ran(_tensors(result if isinstance(result, (tuple, list)) else (result,)), effect)
        return result


def begin(marks: Marks) -> RowWise:
    """Look at the operations from here on."""
    mode = RowWise(marks)
    mode.__enter__()
    marks.watched += 1
    return mode


def end(mode: RowWise) -> None:
    """Look no longer; modes that an exception left open above it stay."""
    above = []
    for other in reversed(dispatch_modes()):
        if other is mode:
            break
        above.append(pop_dispatch_mode())
    mode.__exit__(None, None, None)
    for other in reversed(above):
        push_dispatch_mode(other)
    mode.marks.watched -= 1
    mode.marks.settle()


depth = dispatch_depth
"""How many modes are open: one may be opened for a region only where none has come since the region began."""


def _tensors(tree: Any) -> list[torch.Tensor]:
    found = []
    for each in tree:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += [inner for inner in each if isinstance(inner, torch.Tensor)]
    return found


def _keys(*tensors: Any) -> set[int]:
    found = (plain_storage(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))
    return {key for key in found if key is not None}


# --- rules ---


def elementwise(divisors: Callable[[tuple[Any, ...]], tuple[int, ...]] = lambda args: ()) -> EffectOf:
    """Results as large as the operands broadcast; of `divisors`, by their number, backward needs every row."""

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effect | None:
        operands = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        first = at = None
        others = []
        for tensor in operands:
            found = find(tensor)
            if found is None:
                others.append(tensor)
            elif first is None:
                first, at = found[0], found[1] - tensor.ndim
            elif not first.agrees(found[0]) or at != found[1] - tensor.ndim:
                return None
        if first is None or at is None:
            return None
        if any(tensor.ndim >= -at and tensor.shape[at] != 1 for tensor in others):
            return None
        whole = _keys(*others, *(args[number] for number in divisors(args)))
        return Effect(first, at, _keys(*operands) - whole, whole, sums=any(t.requires_grad for t in others))

    return rule


def product(left: int) -> EffectOf:
    """Operand `left` [rows, k] times what follows it; what stands before it is added to every row."""

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effect | None:
        found = find(args[left])
        if found is None or found[1] != 0 or args[left].ndim != 2:
            return None
        if any(added.ndim > 1 and added.shape[0] != 1 for added in args[:left]):
            return None
        return Effect(found[0], -2, _keys(args[left]), _keys(*args[:left], *args[left + 1 :]), sums=True)

    return rule


def grouped_product(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effect | None:
    """Rows [rows, k] times the matrix of each row's group [groups, k, n]."""
    more = (*args[3:4], kwargs.get("bias"))
    if args[0].ndim != 2 or args[1].ndim != 3 or any(each is not None for each in more):
        return None
    effect = product(0)(find, args, kwargs)
    if effect is not None:
        effect.ends = args[2] if len(args) > 2 else kwargs.get("offs")
    return effect


def normalized(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effect | None:
    """Over the last dimensions; the statistics that it saves have the rows where the input has them."""
    found = find(args[0])
    if found is None or found[1] >= args[0].ndim - len(args[1]):
        return None
    learned = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args[2:])
    return Effect(found[0], found[1] - args[0].ndim, _keys(args[0]), _keys(*args[1:]), sums=learned)


def along(number: int) -> EffectOf:
    """Over one dimension, argument `number`, that is not the rows'."""

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effect | None:
        tensor = args[0]
        found = find(tensor)
        dim = args[number] if len(args) > number else kwargs.get("dim", -1)
        if found is None or dim % tensor.ndim == found[1]:
            return None
        return Effect(found[0], found[1] - tensor.ndim, _keys(tensor), set())

    return rule


def reduction(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effect | None:
    """A sum or mean over dimensions that are not the rows'."""
    tensor, given = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    found = find(tensor)
    if found is None or not given:
        return None
    dims = {dim % tensor.ndim for dim in ([given] if isinstance(given, int) else given)}
    if found[1] in dims:
        return None
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    behind = [dim for dim in range(found[1], tensor.ndim) if keepdim or dim not in dims]
    return Effect(found[0], -len(behind), set(), set())


def concatenation(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effect | None:
    """Marked buffers beside each other, not behind."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    found = [find(tensor) for tensor in args[0]]
    if not found or any(each is None for each in found):
        return None
    mark, at = found[0]
    if any(not mark.agrees(each[0]) or each[1] != at for each in found) or dim % args[0][0].ndim == at:
        return None
    return Effect(mark, at - args[0][0].ndim, set(), set())


def scaled(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effect | None:
    """A product of elements, but not with the number zero: that makes rows that are no garbage."""
    if any(isinstance(arg, (int, float)) and not arg for arg in args):
        return None
    return elementwise()(find, args, kwargs)


def powered(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effect | None:
    """By a number; below one, the backward divides."""
    if not args[1]:
        return None
    return elementwise(lambda args: (0,) if args[1] < 1 else ())(find, args, kwargs)


aten: Any = torch.ops.aten
_plain = elementwise()
_by_second = elementwise(lambda args: (1,) if len(args) > 1 and isinstance(args[1], torch.Tensor) else ())


class Operation(NamedTuple):
    """What is known of an operation."""

    rule: EffectOf | None
    """None: it does not work row by row."""
    node: str | None
    """The node that reads operands or results that were cut; "" if it needs all of them. None: its backward needs
    sizes and indices alone."""
    in_place: bool = False


def _each(rule: EffectOf | None, node: str | None, *of: Any, in_place: bool = False) -> dict[Any, Operation]:
    return dict.fromkeys(of, Operation(rule, node, in_place))


OPERATIONS: dict[Any, Operation] = {
    **_each(
        _plain, None,
        aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar,
        aten.neg.default, aten.clone.default, *operators("_to_copy"),
    ),
    **_each(_plain, None, aten.add_.Tensor, aten.add_.Scalar, in_place=True),
    **_each(scaled, "MulBackward0", aten.mul.Tensor, aten.mul.Scalar),
    **_each(scaled, "MulBackward0", aten.mul_.Tensor, aten.mul_.Scalar, in_place=True),
    **_each(_by_second, "DivBackward0", aten.div.Tensor),
    **_each(_plain, "DivBackward0", aten.div.Scalar),
    **_each(powered, "PowBackward0", aten.pow.Tensor_Scalar),
    **_each(elementwise(lambda args: (0,)), "", aten.log.default),
    **_each(_plain, "AbsBackward0", aten.abs.default),
    **_each(_plain, "ExpBackward0", aten.exp.default),
    **_each(_plain, "SinBackward0", aten.sin.default),
    **_each(_plain, "CosBackward0", aten.cos.default),
    **_each(_plain, "SigmoidBackward0", aten.sigmoid.default),
    **_each(_plain, "TanhBackward0", aten.tanh.default),
    **_each(_plain, "ReluBackward0", aten.relu.default),
    **_each(_plain, "ReluBackward0", aten.relu_.default, in_place=True),
    **_each(_plain, "LeakyReluBackward0", aten.leaky_relu.default),
    **_each(_plain, "SiluBackward0", aten.silu.default),
    **_each(_plain, "GeluBackward0", aten.gelu.default),
    **_each(_plain, "SoftplusBackward0", aten.softplus.default),
    **_each(_plain, "RsqrtBackward0", aten.rsqrt.default),
    **_each(_plain, "ReciprocalBackward0", aten.reciprocal.default),
    **_each(_plain, "Log1PBackward0", aten.log1p.default),
    **_each(_plain, "ClampBackward1", aten.clamp.default),
    **_each(_plain, "ClampMinBackward0", aten.clamp_min.default),
    **_each(_plain, "ClampMaxBackward0", aten.clamp_max.default),
    **_each(_plain, "MaximumBackward0", aten.maximum.default),
    **_each(_plain, "MinimumBackward0", aten.minimum.default),
    **_each(_plain, "NativeDropoutBackward0", aten.native_dropout.default),
    **_each(product(0), "MmBackward0", aten.mm.default),
    **_each(product(1), "AddmmBackward0", aten.addmm.default),
    **_each(grouped_product, "GroupedMmBackward0", *operators("_grouped_mm")),
    **_each(normalized, "NativeLayerNormBackward0", aten.native_layer_norm.default),
    **_each(normalized, "FusedRmsNormBackward0", *operators("_fused_rms_norm")),
    **_each(along(1), "SoftmaxBackward0", *operators("_softmax")),
    **_each(along(1), "LogSoftmaxBackward0", *operators("_log_softmax")),
    **_each(along(1), "GluBackward0", aten.glu.default),
    **_each(reduction, None, aten.sum.dim_IntList, aten.mean.dim),
    **_each(concatenation, None, aten.cat.default),
    **_each(
        None, None,
        aten.sum.default, aten.mean.default, aten.where.self, aten.masked_fill.Scalar, aten.index.Tensor,
        aten.index_select.default, aten.index_add.default, aten.scatter_add.default,
    ),
}  # fmt: skip

_UNKNOWN = Operation(None, "")

NODES = frozenset(each.node for each in OPERATIONS.values())
"""No other may read a tensor that was cut without its own word."""

VIEWS = {aten.detach.default, *operators("_unsafe_view", "_reshape_alias")}
"""They make no values; what they return lies in the same storage, where marks are kept."""
