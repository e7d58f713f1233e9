"""The loss of a language model's head: projection, softmax and cross entropy, without the logits.

`loss = Σ over labelled tokens of (1 - ε)·(lse - x[label]) + ε·(lse - mean x) + z·lse²`, with the logits x_TV = s ·
hidden_TD · weight_VDᵀ, of which a soft cap c makes c·tanh(x / c), lse their log-sum-exp, ε the label smoothing,
and the sum divided by the number of labelled tokens for the mean. T tokens, of which C at a time; D the model's
width, V words of the vocabulary. Tokens whose label is `ignore_index` count for nothing, whatever `hidden_TD`
holds there.

Logits exist for one chunk of tokens at a time, in the model's precision, and their gradient is written over
them as soon as the loss is known; what waits for backward is the gradient of `hidden_TD` and of `weight_VD`. So the
loss must be a scalar that backward scales.

What moves, a chunk: the logits are written by the projection, read twice and written once by the softmax, and
read twice for the two gradients; the product for the weight reads and writes the sum that it adds to.
"""

from dataclasses import dataclass

import torch

from pagestash.kernels.backend import choose, launch, power_of_two, sum_dtype, tl, triton

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
    logit_scale: float = 1.0
    soft_cap: float | None = None
    mean: bool = True
    chunk: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing={self.label_smoothing}: expected 0 to 1")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap={self.soft_cap}: expected a positive number, or None")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk={self.chunk}: expected at least 1 token")


def linear_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_T: torch.Tensor,
    options: LossOptions,
    *,
    need_hidden: bool = True,
    need_weight: bool = True,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The loss (float32) of `hidden_TD` with `weight_VD`, and its gradients for both where needed.

    The weight's gradient is summed over chunks in float32, and stays so. A label that is neither in range nor
    `ignore_index` makes the loss NaN. Without any labelled token the loss is 0.
    """
    if hidden_TD.ndim != 2 or weight_VD.ndim != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden_TD.shape)} and weight {tuple(weight_VD.shape)}: expected [T, D], [V, D]"
        )
    if labels_T.shape != hidden_TD.shape[:1] or labels_T.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"labels {tuple(labels_T.shape)} of {labels_T.dtype}: expected {hidden_TD.shape[0]} integers"
        )
    tokens, vocabulary = hidden_TD.shape[0], weight_VD.shape[0]
    wide = sum_dtype(hidden_TD.dtype)
    losses_T = torch.empty(tokens, dtype=wide, device=hidden_TD.device)
    scale = torch.ones((), dtype=wide, device=hidden_TD.device)
    if options.mean:
        scale = 1.0 / (labels_T != options.ignore_index).sum().clamp(min=1).to(wide)
    use = choose(hidden_TD.device, backend)
    # Backward needs as much as the weight beside the sum of its gradient: logits of that size raise no peak.
    room = max(CHUNK_BYTES, weight_VD.nbytes if need_weight else 0)
    chunk = options.chunk or max(128, room // (vocabulary * hidden_TD.element_size()) // 128 * 128)
    dhidden_TD = torch.empty_like(hidden_TD) if need_hidden else None
    dweight_VD = torch.zeros(weight_VD.shape, dtype=wide, device=weight_VD.device) if need_weight else None
    for start in range(0, tokens, chunk):
        part = slice(start, start + chunk)
        logits_CV = hidden_TD[part] @ weight_VD.t()
        softmax_loss_(logits_CV, labels_T[part], losses_T[part], scale, options, backend=use)
        if dhidden_TD is not None:
            torch.mm(logits_CV, weight_VD, out=dhidden_TD[part])
        if dweight_VD is not None:
            _add_product(
                dweight_VD, logits_CV.t(), _labelled(hidden_TD[part], labels_T[part], options.ignore_index)
            )
        del logits_CV
    return losses_T.sum() * scale, dhidden_TD, dweight_VD


def _labelled(hidden_TD: torch.Tensor, labels_T: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """`hidden_TD` with zeros for tokens without a label: the product over tokens would make NaN of 0 · NaN.

    Always a copy: to ask whether any label is ignored would wait for the device. A token's d elements move twice
    here, beside its V logits five times.
    """
    return torch.where((labels_T == ignore_index)[:, None], 0.0, hidden_TD)


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
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    losses_C: torch.Tensor,
    scale: torch.Tensor,
    options: LossOptions,
    *,
    backend: str = "auto",
) -> None:
    """Write each row's loss, unscaled, and over `logits_CV` their gradient times the device float `scale`."""
    if choose(logits_CV.device, backend) == "torch":
        softmax_loss_reference_(logits_CV, labels_C, losses_C, scale, options)
    elif logits_CV.numel():
        launch(
            _softmax_loss_kernel,
            (logits_CV.shape[0],),
            logits_CV.device,
            logits_CV,
            labels_C,
            losses_C,
            scale,
            logits_CV.shape[1],
            options.ignore_index,
            float(options.label_smoothing),
            float(options.z_loss),
            float(options.logit_scale),
            float(options.soft_cap or 1.0),
            CAPPED=options.soft_cap is not None,
            BLOCK=min(BLOCK, power_of_two(logits_CV.shape[1])),
            num_warps=WARPS,
        )


# --- what: the torch reference ------------------------------------------------------------------------------


def softmax_loss_reference_(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    losses_C: torch.Tensor,
    scale: torch.Tensor,
    options: LossOptions,
) -> None:
    vocabulary = logits_CV.shape[1]
    x = logits_CV.to(losses_C.dtype) * options.logit_scale
    slope: torch.Tensor | float = options.logit_scale
    if options.soft_cap is not None:
        capped = torch.tanh(x / options.soft_cap)
        x, slope = options.soft_cap * capped, slope * (1 - capped**2)
    lse = torch.logsumexp(x, dim=1)
    counted = labels_C != options.ignore_index
    bad = counted & ((labels_C < 0) | (labels_C >= vocabulary))
    at = labels_C.clamp(0, vocabulary - 1).to(torch.int64)[:, None]
    smooth = options.label_smoothing
    loss = lse - (1 - smooth) * x.gather(1, at)[:, 0] + options.z_loss * lse**2
    if smooth:  # 0 · mean is NaN where a logit is -inf
        loss = loss - smooth * x.mean(1)
    losses_C.copy_(torch.where(bad, torch.nan, torch.where(counted, loss, 0.0)))
    gradient = torch.exp(x - lse[:, None]) * (1 + 2 * options.z_loss * lse[:, None]) - smooth / vocabulary
    gradient.scatter_add_(1, at, torch.full_like(at, smooth - 1, dtype=x.dtype))
    logits_CV.copy_(torch.where(counted[:, None], gradient * slope * scale, 0.0))


# --- how: the Triton kernel ---------------------------------------------------------------------------------


@triton.jit
def _logit(product, logit_scale, soft_cap, CAPPED: tl.constexpr):
    value = product * logit_scale
    if CAPPED:
        value = soft_cap * (2.0 * tl.sigmoid(2.0 * value / soft_cap) - 1.0)  # tanh
    return value


@triton.jit(do_not_specialize=["ignore_index", "smooth", "z_loss", "logit_scale", "soft_cap"])
def _softmax_loss_kernel(
    logits,
    labels,
    losses,
    scale,
    vocabulary,
    ignore_index,
    smooth,
    z_loss,
    logit_scale,
    soft_cap,
    CAPPED: tl.constexpr,
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
            value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
            value = tl.where(inside, _logit(value, logit_scale, soft_cap, CAPPED), float("-inf"))
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
        chosen = _logit(chosen, logit_scale, soft_cap, CAPPED)
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
            value = _logit(value, logit_scale, soft_cap, CAPPED)
            gradient = tl.exp(value - lse) * (1.0 + 2.0 * z_loss * lse) - smooth / vocabulary
            gradient -= tl.where(column == label, 1.0 - smooth, 0.0)
            gradient *= logit_scale
            if CAPPED:
                gradient *= 1.0 - (value / soft_cap) * (value / soft_cap)
            tl.store(x + column, (gradient * factor).to(logits.dtype.element_ty), mask=inside)
            start += BLOCK
    else:
        tl.store(losses + row, 0.0)
        while start < vocabulary:
            column = start + tl.arange(0, BLOCK)
            nothing = tl.zeros((BLOCK,), logits.dtype.element_ty)
            tl.store(x + column, nothing, mask=column < vocabulary)
            start += BLOCK
