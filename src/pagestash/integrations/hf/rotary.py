"""The rotary functions that attention modules call, known by what they compute.

One is taken over if it gives, on random tensors, the bits of one of the styles of our kernel.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from pagestash.integrations.hf.report import Ran, is_liger
from pagestash.kernels.layer.rope import STYLES, Style, rope, rotate

Form = tuple[Style, bool]
"""The style, and whether products are in float32."""


def rotary_by_kernel(theirs: dict[str, Callable[..., Any]], ran: Ran) -> dict[str, Callable[..., Any]] | str:
    """Functions that do by our kernel what those of the same name do; or why there are none."""
    ours = {}
    for name, function in theirs.items():
        if is_liger(function):
            return f"Liger has replaced {name}"
        form = _form(function)
        if form is None:
            return f"{name} rotates in a way that the kernel does not"
        ours[name] = _rotary(function, *form, ran)
    return ours


def _rotary(theirs: Callable[..., Any], style: Style, wide: bool, ran: Ran) -> Callable[..., Any]:
    """`theirs` by our kernel, where the arguments are those that it is for."""

    def rotary(
        q: torch.Tensor, k: Any = None, cos: Any = None, sin: Any = None, *args: Any, **options: Any
    ) -> Any:
        if k is None or cos is None or sin is None:
            given = {"k": k, "cos": cos, "sin": sin}
            return theirs(
                q, *args, **{name: value for name, value in given.items() if value is not None}, **options
            )
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
        ran.yes = True
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
