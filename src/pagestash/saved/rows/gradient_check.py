"""The check: whether, in backward, a gradient reaches rows past the valid ones, whose values were dropped."""

import torch

GARBAGE = "pagestash: the gradient of rows past the valid ones may be garbage"
"""A key in the metadata of a node."""

HANDS_ON = (
    "Mul", "Div", "Add", "Sub", "Rsub", "Neg", "Silu", "Gelu", "Relu", "LeakyRelu", "Sigmoid", "Tanh",
    "Softplus", "Glu", "Exp", "Log", "Sin", "Cos", "Abs", "Rsqrt", "Reciprocal", "Clamp", "Maximum",
    "Minimum", "Pow", "Softmax", "Cat", "NativeDropout", "ToCopy", "Clone", "View", "UnsafeView", "Reshape",
    "Split", "Slice", "Unbind", "T", "Permute", "Unsqueeze", "Squeeze", "Expand", "Alias", "Mean", "Sum",
    "NativeLayerNorm", "FusedRmsNorm",
)  # fmt: skip
"""How the names of nodes begin that give a row of gradients for each that they get."""


def expect_garbage(tensor: torch.Tensor) -> None:
    """What reads `tensor` may leave garbage in its gradient: so may all that hand rows on, up to its origin."""
    nodes = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or not node.name().startswith(HANDS_ON):
            continue
        facts: dict[str, object] = node.metadata  # type: ignore[assignment]  # a property, whatever its stub says
        if GARBAGE not in facts:
            facts[GARBAGE] = True
            nodes += [before for before, _ in node.next_functions]


def watch_gradient(result: torch.Tensor, dim: int, count: int, last: int, *, sums: bool, saved: str) -> None:
    """Refuse, in backward, a gradient of `result` that is not zero in rows `count` to `last` of dimension `dim`.

    `saved` says what its operation saved without these rows; whether it `sums` over rows decides if garbage counts.
    """
    node = result.grad_fn
    assert node is not None
    facts: dict[str, object] = node.metadata  # type: ignore[assignment]
    message = (
        f"rows past the valid ones were read: {node.name()} saved {saved} without rows {count} to {last - 1}, "
        "which are not valid, and a gradient that is not zero reaches them: the result would be wrong. Mark with "
        "ps.rows(x, n) only buffers whose other rows nothing reads: cut them off, or mask them, before anything "
        "sums over rows. (If it is garbage that a custom autograd function left there, let that zero it)"
    )

    def look(gradients: tuple[torch.Tensor | None, ...]) -> None:
        gradient = gradients[0]
        if gradient is None or count >= last or (GARBAGE in facts and not sums):
            return
        if bool((gradient.narrow(dim, count, last - count) != 0).any()):
            raise RuntimeError(message)

    node.register_prehook(look)
