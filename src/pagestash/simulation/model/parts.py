"""What a layer is on one rank for one microbatch: parts, what they save, hold, compute and send.

With, for one microbatch,

    T   tokens of this rank, after context parallelism       Ts = T / TP   outside attention and MLPs
    R = Ts · K   received rows                               b   bytes of an activation
    p   bytes of a product's input, as it is saved: b, or in 8 bits its quantized copy

A saved tensor is a `Piece`: its bytes, and the region that makes it, whose recompute drops it. The region that
saves it, the part's, gives it any other home. `modules.py` has the parts of a decoder.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    """`groups` products [m, k] x [k, n]."""

    m: float
    n: float
    k: float
    groups: int = 1

    @property
    def operations(self) -> float:
        return 2 * self.groups * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Piece:
    """A saved tensor."""

    bytes: int
    maker: str
    """The region that makes it; `HELD` where no recompute of this layer drops it."""


UP, KV_UP = "attn.qkv_linear.up", "attn.qkv_linear.kv_up"
"""Makers of latent attention's queries and keys, and of the up-projection that values are a view of."""
STATISTICS, ACTIVATION = "attn.core_attn.statistics", "moe.experts.activation"
"""Makers of softmax's statistics, and of the second product's input."""
ROPE, HEAD_NORMS = "attn.rope", "attn.q_norm"
"""Makers of rotated queries and keys, and of what RoPE takes where a model has norms of queries and keys."""
RESIDUAL = "residual"
"""Maker of the sum after attention, which only the recompute of whole layers drops."""
HELD = ""
"""Maker of what comes from outside the layer, or is not computed twice: its input, routes, received rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One module of a layer, on one rank, for one microbatch."""

    name: str
    pieces: tuple[Piece, ...] = ()
    """What it adds to what forward saves for backward."""
    routed: bool = False
    """Whether its bytes, products and traffic are in proportion to received rows."""
    parameters: int = 0
    expert: bool = False
    """Whether its parameters are experts', which other ranks hold by the expert parallel layout."""
    products: tuple[Product, ...] = ()
    scores: float = 0.0
    """Operations of attention's scores in forward."""
    traffic: float = 0.0
    """Bytes that its kernels beside products read and write in forward."""
    temporary: int = 0
    """Most bytes of gradients and copies while its backward runs, beside those of its weight."""
    kernels: int = 0
    """Launched in forward beside products and collectives."""
    norms: int = 0
    """Weights that belong to no product."""
    weight_gradient: int = 0
    """Bytes of weight gradients that are temporary tensors then."""
    gathers: tuple[float, ...] = ()
    """Bytes of all-gathers and reduce-scatters over tensor parallel ranks in forward; backward has as many."""
    context_bytes: float = 0.0
    """Of keys and values that context parallel ranks gather."""
    view_bytes: int = 0
    """What a checkpoint of the part holds more: its values are a view of the whole projection."""

    @property
    def saved(self) -> int:
        """Bytes that it adds to what forward saves."""
        return sum(piece.bytes for piece in self.pieces)

    @property
    def operations(self) -> float:
        """Floating-point operations of forward."""
        return sum(product.operations for product in self.products) + self.scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer, the embedding or the head."""

    name: str
    parts: tuple[Part, ...]
    dispatch_bytes: float = 0.0
    """Sent to other ranks of the expert parallel group in forward, and as many by combine."""

    @property
    def saved(self) -> int:
        return sum(part.saved for part in self.parts)

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def operations(self) -> float:
        return sum(part.operations for part in self.parts)
