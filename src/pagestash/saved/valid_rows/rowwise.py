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
from typing import Any

import torch

from pagestash.saved.compiled import hidden
from pagestash.saved.storage import plain_storage
from pagestash.saved.valid_rows.mark import Effect
from pagestash.saved.valid_rows.marks import Marks
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
Rule = Callable[[Find, tuple[Any, ...], dict[str, Any]], Effect | None]


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
        rule = TABLE.get(func)
        effect = rule(marks.find, args, kwargs) if rule is not None else None
        has_node = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
        number = next_sequence_number() if has_node else None
        marks.settle(set() if func in SAVES_NO_OPERAND else keys, effect, number)
        result = func(*args, **kwargs)
        if effect is not None and effect.ends is not None:
            marks.ignores_the_rest(args[0])
        if effect is not None and func in IN_PLACE:
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


def elementwise(divisors: Callable[[tuple[Any, ...]], tuple[int, ...]] = lambda args: ()) -> Rule:
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


def product(left: int) -> Rule:
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


def along(number: int) -> Rule:
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

IN_PLACE = {aten.add_.Tensor, aten.add_.Scalar, aten.mul_.Tensor, aten.mul_.Scalar, aten.relu_.default}

TABLE: dict[Any, Rule] = {
    **dict.fromkeys(
        (
            aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor,
            aten.neg.default, aten.abs.default, aten.exp.default, aten.sin.default, aten.cos.default,
            aten.sigmoid.default, aten.tanh.default, aten.relu.default, aten.leaky_relu.default, aten.silu.default,
            aten.gelu.default, aten.softplus.default, aten.rsqrt.default, aten.reciprocal.default,
            aten.log1p.default, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default,
            aten.maximum.default, aten.minimum.default, aten.clone.default, aten.native_dropout.default,
            aten.add_.Tensor, aten.add_.Scalar, aten.relu_.default, *operators("_to_copy"),
        ),
        _plain,
    ),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar), scaled),
    aten.div.Tensor: _by_second,
    aten.div.Scalar: _plain,
    aten.log.default: elementwise(lambda args: (0,)),
    aten.pow.Tensor_Scalar: powered,
    aten.mm.default: product(0),
    aten.addmm.default: product(1),
    aten.native_layer_norm.default: normalized,
    **dict.fromkeys(operators("_softmax", "_log_softmax"), along(1)),
    **dict.fromkeys(operators("_grouped_mm"), grouped_product),
    **dict.fromkeys(operators("_fused_rms_norm"), normalized),
    aten.glu.default: along(1),
    aten.sum.dim_IntList: reduction,
    aten.mean.dim: reduction,
    aten.cat.default: concatenation,
}  # fmt: skip

VIEWS = {aten.detach.default, *operators("_unsafe_view", "_reshape_alias")}
"""They make no values; what they return lies in the same storage, where marks are kept."""

SAVES_NO_OPERAND = {
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor,
    aten.neg.default, aten.clone.default, *operators("_to_copy"), aten.cat.default, aten.sum.default,
    aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.where.self, aten.masked_fill.Scalar,
    aten.index.Tensor, aten.index_select.default, aten.index_add.default, aten.scatter_add.default,
    aten.add_.Tensor, aten.add_.Scalar,
}  # fmt: skip
"""Operations whose backward needs sizes and indices alone."""

NODES = {
    "MulBackward0", "DivBackward0", "PowBackward0", "AbsBackward0", "ExpBackward0", "SinBackward0", "CosBackward0",
    "SigmoidBackward0", "TanhBackward0", "ReluBackward0", "LeakyReluBackward0", "SiluBackward0", "GeluBackward0",
    "SoftplusBackward0", "RsqrtBackward0", "ReciprocalBackward0", "Log1PBackward0", "ClampBackward1",
    "ClampMinBackward0", "ClampMaxBackward0", "MaximumBackward0", "MinimumBackward0", "NativeDropoutBackward0",
    "MmBackward0", "AddmmBackward0", "GroupedMmBackward0", "NativeLayerNormBackward0", "FusedRmsNormBackward0",
    "SoftmaxBackward0", "LogSoftmaxBackward0", "GluBackward0",
}  # fmt: skip
"""The nodes of the operations above that save a tensor: no other may read one that was cut without its own word."""
