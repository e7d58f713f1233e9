"""The loss of a language model's head: projection, softmax and cross entropy, without the logits.

`loss = Σ over labelled tokens of (1 - ε)·(lse - x[label]) + ε·(lse - mean x) + z·lse²`, with the logits
x = hidden · weightᵀ, lse their log-sum-exp, ε the label smoothing, and the sum divided by the number of
labelled tokens for the mean. Tokens whose label is `ignore_index` count for nothing, whatever `hidden` holds there.

Logits exist for one chunk of tokens at a time, in the model's precision, and their gradient is written over
them as soon as the loss is known; what waits for backward is the gradient of `hidden` and of `weight`. So the
loss must be a scalar that backward scales.

What moves, a chunk: the logits are written by the projection, read twice and written once by the softmax, and
read twice for the two gradients; the product for the weight reads and writes the sum that it adds to.
"""

from dataclasses import dataclass

import torch

from pagestash.kernels.backend import choose, tl, triton

CHUNK_BYTES = 256 << 20
"""Logits at a time, at least: a GEMM runs near its full rate, and it is 1 % of what a long batch would keep."""
BLOCK = 4096
WARPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """What is computed; `chunk` is the number of tokens whose logits exist at a time (None: by size)."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    mean: bool = True
    chunk: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing={self.label_smoothing}: expected 0 to 1")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk={self.chunk}: expected at least 1 token")


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    options: LossOptions,
    *,
    need_hidden: bool = True,
    need_weight: bool = True,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The loss (float32) of `hidden` [N, d] with `weight` [V, d], and its gradients for both where needed.

    The weight's gradient is summed over chunks in float32, and stays so. A label that is neither in range nor
    `ignore_index` makes the loss NaN. Without any labelled token the loss is 0.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}: expected [N, d], [V, d]"
        )
    if labels.shape != hidden.shape[:1] or labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"labels {tuple(labels.shape)} of {labels.dtype}: expected {hidden.shape[0]} integers"
        )
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    losses = torch.empty(tokens, dtype=wide, device=hidden.device)
    scale = torch.ones((), dtype=wide, device=hidden.device)
    if options.mean:
        scale = 1.0 / (labels != options.ignore_index).sum().clamp(min=1).to(wide)
    use = choose(hidden.device, backend)
    # Backward needs as much as the weight beside the sum of its gradient: logits of that size raise no peak.
    room = max(CHUNK_BYTES, weight.nbytes if need_weight else 0)
    chunk = options.chunk or max(128, room // (vocabulary * hidden.element_size()) // 128 * 128)
    dhidden = torch.empty_like(hidden) if need_hidden else None
    dweight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_weight else None
    for start in range(0, tokens, chunk):
        part = slice(start, start + chunk)
        logits = hidden[part] @ weight.t()
        softmax_loss_(logits, labels[part], losses[part], scale, options, backend=use)
        if dhidden is not None:
            torch.mm(logits, weight, out=dhidden[part])
        if dweight is not None:
            _add_product(dweight, logits.t(), _labelled(hidden[part], labels[part], options.ignore_index))
        del logits
    return losses.sum() * scale, dhidden, dweight


def _labelled(hidden: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """`hidden` with zeros for tokens without a label: the product over tokens would make NaN of 0 · NaN.

    Always a copy: to ask whether any label is ignored would wait for the device. A token's d elements move twice
    here, beside its V logits five times.
    """
    return torch.where((labels == ignore_index)[:, None], 0.0, hidden)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left` · `right` to `total`, in the precision of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        # In the product itself: rounded before it is added it would be less precise, and memory of its own.
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def softmax_loss_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    losses: torch.Tensor,
    scale: torch.Tensor,
    options: LossOptions,
    *,
    backend: str = "auto",
) -> None:
    """Write each row's loss, unscaled, and over `logits` their gradient times the device float `scale`."""
    if choose(logits.device, backend) == "torch":
        softmax_loss_reference_(logits, labels, losses, scale, options)
    elif logits.numel():
        _softmax_loss_kernel[(logits.shape[0],)](
            logits,
            labels,
            losses,
            scale,
            logits.shape[1],
            options.ignore_index,
            float(options.label_smoothing),
            float(options.z_loss),
            BLOCK=min(BLOCK, triton.next_power_of_2(logits.shape[1])),
            num_warps=WARPS,
        )


# --- what: the torch reference ------------------------------------------------------------------------------


def softmax_loss_reference_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    losses: torch.Tensor,
    scale: torch.Tensor,
    options: LossOptions,
) -> None:
    vocabulary = logits.shape[1]
    x = logits.to(losses.dtype)
    lse = torch.logsumexp(x, dim=1)
    counted = labels != options.ignore_index
    bad = counted & ((labels < 0) | (labels >= vocabulary))
    at = labels.clamp(0, vocabulary - 1).to(torch.int64)[:, None]
    smooth = options.label_smoothing
    loss = lse - (1 - smooth) * x.gather(1, at)[:, 0] + options.z_loss * lse**2
    if smooth:  # 0 · mean is NaN where a logit is -inf
        loss = loss - smooth * x.mean(1)
    losses.copy_(torch.where(bad, torch.nan, torch.where(counted, loss, 0.0)))
    gradient = torch.exp(x - lse[:, None]) * (1 + 2 * options.z_loss * lse[:, None]) - smooth / vocabulary
    gradient.scatter_add_(1, at, torch.full_like(at, smooth - 1, dtype=x.dtype))
    logits.copy_(torch.where(counted[:, None], gradient * scale, 0.0))


# --- how: the Triton kernel ---------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["ignore_index", "smooth", "z_loss"])
def _softmax_loss_kernel(
    logits,
    labels,
    losses,
    scale,
    vocabulary,
    ignore_index,
    smooth,
    z_loss,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    counted = label != ignore_index
    x = logits + row * vocabulary
    start = 0
    if counted:
        # One pass keeps a maximum and a sum for every lane; the lanes meet once, at the end.
        highest = tl.zeros((BLOCK,), tl.float32) - float("inf")
        total = tl.zeros((BLOCK,), tl.float32)
        plain = tl.zeros((BLOCK,), tl.float32)
        while start < vocabulary:
            column = start + tl.arange(0, BLOCK)
            inside = column < vocabulary
            value = tl.load(x + column, mask=inside, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(highest, value)
            # A lane that has seen nothing yet has -inf - -inf.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(highest - shift) + tl.exp(value - shift)
            plain += tl.where(inside, value, 0.0)
            highest = higher
            start += BLOCK
        top = tl.max(highest, 0)
        lse = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
        known = (label >= 0) & (label < vocabulary)
        chosen = tl.load(x + label, mask=known, other=float("nan")).to(tl.float32)
        loss = lse - (1.0 - smooth) * chosen + z_loss * lse * lse
        # 0 · mean is NaN where a logit is -inf.
        loss -= tl.where(smooth > 0.0, smooth * (tl.sum(plain, 0) / vocabulary), 0.0)
        tl.store(losses + row, loss)
        # Every warp has read the chosen logit before it is overwritten.
        tl.debug_barrier()
        factor = tl.load(scale)
        start = 0
        while start < vocabulary:
            column = start + tl.arange(0, BLOCK)
            inside = column < vocabulary
            value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
            gradient = tl.exp(value - lse) * (1.0 + 2.0 * z_loss * lse) - smooth / vocabulary
            gradient -= tl.where(column == label, 1.0 - smooth, 0.0)
            tl.store(x + column, (gradient * factor).to(logits.dtype.element_ty), mask=inside)
            start += BLOCK
    else:
        tl.store(losses + row, 0.0)
        while start < vocabulary:
            column = start + tl.arange(0, BLOCK)
            nothing = tl.zeros((BLOCK,), logits.dtype.element_ty)
            tl.store(x + column, nothing, mask=column < vocabulary)
            start += BLOCK
