"""Interpreted operations without what Triton repeats for each of them.

An operation on a few numbers takes its time in Python: it writes down the shape of its result, compares types by
their names, and looks for the type to compute in. None of that depends on the numbers. The functions here replace
the language's, which they wrap, and give what those give: `tests/test_support.py` compares them.
"""

import dataclasses
import functools
import math
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

SINGLE = frozenset({tl.dtype, tl.pointer_type, tl.block_type, tl.tensor, int, float, bool, str, type(None)})
"""Types that are neither constants of the language nor have parts."""

BUILTIN = tl.core.add.__code__
"""Of the function that `tl.core.builtin` wraps others in, which checks that `_semantic` is given."""


def prepare() -> None:
    drop_unread_checks()
    interpreter._patch_attr = patch_directly
    tl.core._unwrap_if_constexpr = unwrapped(tl.core._unwrap_if_constexpr)
    tl.tensor.__init__ = tensor_of
    tl.dtype.__eq__ = same_or(tl.dtype.__eq__)
    tl.block_type.with_element_ty = remembered_by_element(tl.block_type.with_element_ty)
    TritonSemantic.cast = unless_cast(TritonSemantic.cast)
    TritonSemantic.computation_type_impl = remembered_by_name(TritonSemantic.computation_type_impl)
    TritonSemantic.binary_op_type_checking_impl = unless_alike(TritonSemantic.binary_op_type_checking_impl)


def drop_unread_checks() -> None:
    """Without `debug` the interpreter computes whether integers overflow, and does not look at the result."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def patch_directly(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Give the function of the language its `_semantic` without two functions in between."""
    inner = member.__wrapped__ if getattr(member, "__code__", None) is BUILTIN else member

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **named)

    scope.set_attr(owner, name, call)


def unwrapped(inner: Any) -> Any:
    @functools.wraps(inner)
    def unwrap(value: Any) -> Any:
        return value if type(value) in SINGLE else inner(value)

    return unwrap


@functools.cache
def shape_and_numel(*sizes: int) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def tensor_of(self: Any, handle: Any, type: Any) -> None:
    """`tl.tensor.__init__`; tensors of one shape share it."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = shape_and_numel(*(type.shape if type.is_block() else ()))


def same_or(inner: Any) -> Any:
    @functools.wraps(inner)
    def equal(self: Any, other: Any) -> bool:
        return self is other or inner(self, other)

    return equal


def remembered_by_element(inner: Any) -> Any:
    @functools.wraps(inner)
    def with_element(self: Any, element: Any) -> Any:
        known = self.__dict__.setdefault("_with_element", {})
        if id(element) not in known:
            known[id(element)] = element, inner(self, element)  # the element lives on, and its id with it
        return known[id(element)][1]

    return with_element


def unless_cast(inner: Any) -> Any:
    @functools.wraps(inner)
    def cast(self: Any, value: Any, to: Any, *rest: Any, **named: Any) -> Any:
        return value if value.dtype is to else inner(self, value, to, *rest, **named)

    return cast


def remembered_by_name(inner: Any) -> Any:
    """Of two scalar types, which their names tell apart."""
    known: dict[tuple, Any] = {}

    @functools.wraps(inner)
    def computation_type(
        self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, divides: bool
    ) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, divides
        if key not in known:
            known[key] = inner(self, a, a_is_scalar, b, b_is_scalar, divides)
        return known[key]

    return computation_type


def unless_alike(inner: Any) -> Any:
    """Two tensors of one type, integers or floats that are not divided, are computed with as they are."""

    @functools.wraps(inner)
    def checked(self: Any, left: Any, right: Any, *rest: Any, **named: Any) -> Any:
        if type(left) is tl.tensor and type(right) is tl.tensor and left.type is right.type:
            kind = left.dtype
            if kind.is_int() or (kind.is_floating() and not named.get("div_or_mod") and len(rest) < 4):
                return left, right
        return inner(self, left, right, *rest, **named)

    return checked
