"""`rows`: say of a buffer how many of its rows are valid."""

import warnings

import torch

from pagestash.saved.region import frames, look_at_operations, replaying
from pagestash.torch_internals import MISSING_FOR_ROWS, next_sequence_number


def rows(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Mark the worst-case buffer `x`: its first `n` rows are valid. Returns `x`.

        x = ps.rows(permuted, count)            # [capacity, d], count of them valid
        h = F.silu(x @ gate) * (x @ up)         # computed row by row: marked, too

    Only the valid rows of marked tensors are stashed or offloaded; the others come back as zeros. You promise that
    the gradient of those is zero, in `x` and in what is computed from it row by row (docs/rows.md has the table).
    Everything else is saved whole, and so are integers, booleans and weights. `n` is an integer tensor of one
    element on the device, which must keep its value until the region ends. Outside a keeper's step this does
    nothing.

    A custom `autograd.Function` saves marked tensors whole, unless it marks them itself, in its forward or in
    `setup_context`: `ctx.save_for_backward(ps.rows(x, n))`. Such a function applies no other in its forward.
    """
    if torch.compiler.is_compiling():
        return x
    if not isinstance(n, torch.Tensor) or n.numel() != 1 or n.is_floating_point() or n.dtype == torch.bool:
        what = f"{n.dtype} {tuple(n.shape)}" if isinstance(n, torch.Tensor) else repr(n)
        raise ValueError(f"rows(x, {what}): expected an integer tensor on the device, of one element")
    if not x.ndim:
        raise ValueError("rows(x, n): x has no rows, it is a scalar")
    current = frames()
    if not current or replaying():
        return x
    if MISSING_FOR_ROWS is not None:
        warnings.warn(f"{MISSING_FOR_ROWS}: ps.rows marks nothing, buffers are saved whole", stacklevel=2)
        return x
    function = None if torch.is_grad_enabled() else next_sequence_number()
    for owner in dict.fromkeys(frame.owner for frame in current):
        owner.marks.add(x, n, function=function)
    inner = current[-1]
    if not inner.whole_step and inner.owner.marks.any:
        look_at_operations(inner)
    return x
