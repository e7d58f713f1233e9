"""The rotary embedding that attention modules call, known by what it computes.

Models call a function of their file, `apply_rotary_pos_emb` or the like, from the attention's `forward`. An
instance gets a copy of that `forward` that finds our function under the same name; class and file stay as they are.
A function is taken over if it gives, on random tensors, the bits of one of the styles of our kernel.
"""

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from pagestash.integrations.hf.report import Report, patched_already
from pagestash.kernels.layer.rope import STYLES, Style, rope, rotate

Form = tuple[Style, bool]
"""The style, and whether products are in float32."""


def replace_rotary(modules: list[tuple[str, nn.Module]], report: Report) -> None:
    """Give each attention among `modules`, with their names, that rotates its queries and keys our kernel."""
    known: dict[Any, Callable[..., Any] | str] = {}
    for name, module in modules:
        called = _rotations(type(module))
        if not called:
            continue
        why = patched_already(module)
        if why is not None:
            report.leave("rope", name, module, why)
            continue
        if type(module) not in known:
            known[type(module)] = _forward_with_ours(type(module), called)
        forward = known[type(module)]
        if isinstance(forward, str):
            report.leave("rope", name, module, forward)
            continue
        put: Any = module
        put.forward = MethodType(forward, module)
        report.replace("rope", name, module, "the RoPE kernel")


def _rotations(kind: type) -> dict[str, Callable[..., Any]]:
    """The functions of its file that the class's `forward` may call and that rotate, by name."""
    forward = getattr(kind, "forward", None)
    if not isinstance(forward, FunctionType):
        return {}
    names = [name for name in forward.__code__.co_names if name.startswith("apply_") and "rotary" in name]
    found = {name: forward.__globals__.get(name) for name in names}
    return {name: value for name, value in found.items() if callable(value)}


def _forward_with_ours(kind: type, called: dict[str, Callable[..., Any]]) -> Callable[..., Any] | str:
    """A copy of the class's `forward` that calls our kernel; or why there is none."""
    ours = {}
    for name, theirs in called.items():
        form = _form(theirs)
        if form is None:
            return f"{name} rotates in a way that the kernel does not"
        ours[name] = _rotary(theirs, *form)
    forward: Any = kind.forward  # type: ignore[attr-defined]
    # A code object of its own: a compiler keeps what it compiled by code object.
    code = forward.__code__.replace(co_name="forward")
    copy = FunctionType(
        code, {**forward.__globals__, **ours}, "forward", forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__annotations__, copy.__doc__ = forward.__annotations__, forward.__doc__
    copy.__module__ = __name__
    return copy


def _rotary(theirs: Callable[..., Any], style: Style, wide: bool) -> Callable[..., Any]:
    """`theirs` by our kernel, where the arguments are those that it is for."""

    def rotary(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads_dim = options.get("unsqueeze_dim", 1)
        fits = (
            not args
            and options.keys() <= {"unsqueeze_dim"}
            and heads_dim in (1, 2)
            and (q.ndim, k.ndim, cos.ndim) == (4, 4, 3)
            and q.dtype == k.dtype
            and (wide or cos.dtype == q.dtype)
            and not cos.requires_grad
        )
        if not fits:
            return theirs(q, k, cos, sin, *args, **options)
        return rope(q, k, cos, sin, style=style, wide=wide, heads_dim=heads_dim)

    return rotary


def _form(function: Callable[..., Any]) -> Form | None:
    """The style that `function` computes, found by running it on the CPU; None if it is none of them."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    if parameters[:4] != ["q", "k", "cos", "sin"]:
        return None
    for wide in (False, True):
        for style in STYLES:
            if _computes(function, style, wide):
                return style, wide
    return None


def _computes(function: Callable[..., Any], style: Style, wide: bool) -> bool:
    """Whether results and gradients' dtype are ours, bit for bit, where all dimensions are rotated, or a part."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for dtype in (torch.float32, torch.bfloat16):
        q, k = random(2, 3, 5, 32).to(dtype), random(2, 1, 5, 32).to(dtype)
        angle = random(2, 5, 16)
        angle = angle if style == "half_table" else torch.cat([angle, angle], -1)
        # A model that computes in float32 has its table in it.
        cos, sin = (table.to(torch.float32 if wide else dtype) for table in (angle.cos(), angle.sin()))
        try:
            with torch.no_grad():
                got = function(q, k, cos, sin)
        except Exception:  # written for other shapes
            return False
        wanted = rotate(q, k, cos, sin, style=style, wide=wide, backend="torch")
        same = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, wanted, strict=False))
        if len(got) != 2 or not same:
            return False
    return True
