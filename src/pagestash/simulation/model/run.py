"""`Run`: what is simulated, and what follows from it for one microbatch on one rank (letters: `parts.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, get_args

from pagestash.models.config import DecoderConfig
from pagestash.simulation.cluster.cluster import PRECISIONS, SAVED_BYTES, Cluster, Precision
from pagestash.simulation.cluster.layout import Layout, check_placement, place_evenly
from pagestash.simulation.model.framework import FRAMEWORKS, Framework, ParameterBytes
from pagestash.simulation.model.homes import Homes, PolicyHomes

RESERVE = 0.06
Dispatcher = Literal["alltoall", "flex"]
DISPATCHERS: tuple[Dispatcher, ...] = get_args(Dispatcher)
GRAPHED: dict[str, tuple[str, ...]] = {
    "attn": ("attn_norm", "attn.qkv_linear", "attn.q_norm", "attn.core_attn", "attn.attn_proj"),
    "router": ("mlp_norm", "moe.router", "moe.shared_experts"),
    "mlp": ("mlp_norm", "mlp"),
    "full": (),
}
"""Parts by the scope of a CUDA graph: Megatron-LM's `attn`, `moe_router` with `moe_preprocess`, and `mlp`. In a
graph of the full iteration nothing is launched by itself."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is simulated: a model, where it runs, and how."""

    config: DecoderConfig
    cluster: Cluster
    layout: Layout
    sequence: int
    global_batch: int
    """Sequences of a step."""
    microbatch: int = 1
    """Sequences of a microbatch."""
    homes: Homes = field(default_factory=PolicyHomes)
    framework: Framework = FRAMEWORKS["pagestash"]
    precision: Precision = "bf16"
    parameters: ParameterBytes = field(default_factory=ParameterBytes)
    capacity: float = 0.0
    """Rows of static buffers over balanced rows; 0: shapes are those of the rows that came."""
    placement: Sequence[int] | None = None
    """Layers of each stage; None: evenly from the first."""
    overlaps_dispatch: bool = False
    """Whether a forward and a backward run side by side, one computing while the other communicates."""
    delays_weight_gradients: bool = False
    """Whether weight gradients wait for the end of their layer (Megatron-LM's `--delay-wgrad-compute`)."""
    dispatcher: Dispatcher = "alltoall"
    graphs: Sequence[str] = ()
    """What is captured in CUDA graphs: `attn`, `router` and `mlp` layer by layer, or all of forward and backward
    (`full`)."""
    reserve: float = RESERVE
    """Part of the device's memory that is left for what allocators reserve beyond what is allocated."""

    skew: float = 1.0
    """Received rows of a layer's hottest rank, over their mean."""

    def __post_init__(self) -> None:
        if self.layout.devices != self.cluster.devices:
            raise ValueError(
                f"a layout of {self.layout.devices} devices on a cluster of {self.cluster.devices}"
            )
        self.layout.check_model(self.config, self.sequence)
        if self.capacity and not 1 <= self.capacity < inf:
            raise ValueError(f"capacity={self.capacity}: expected at least 1, or 0 for buffers of exact size")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve={self.reserve}: expected a part of the device's memory, like 0.06")
        if self.dispatcher not in DISPATCHERS:
            raise ValueError(f"dispatcher={self.dispatcher!r}: expected {' or '.join(DISPATCHERS)}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r}: expected one of {', '.join(PRECISIONS)}")
        unknown = [scope for scope in self.graphs if scope not in GRAPHED]
        if unknown or ("full" in self.graphs and len(self.graphs) > 1):
            parts = ", ".join(scope for scope in GRAPHED if scope != "full")
            raise ValueError(f"graphs={','.join(self.graphs)}: expected some of {parts}, or full by itself")

        if not 1 <= self.skew <= self.layout.ep:
            raise ValueError(
                f"skew={self.skew:g}: expected 1 (balanced rows) to EP {self.layout.ep} (one rank gets all)"
            )
        if self.capacity and self.capacity < self.skew:
            raise ValueError(
                f"capacity={self.capacity:g} holds less than skew={self.skew:g} times the balanced rows"
            )

    @property
    def held_rows(self) -> float:
        """Received rows of the fullest rank, over their mean.

        Each layer is hot on another rank: sums over L layers have a deviation of sqrt(L) of them.
        """
        layers = (self.config.layers - self.config.dense_layers) / self.layout.pp
        return 1 + (self.skew - 1) / max(1.0, layers) ** 0.5

    @property
    def tokens(self) -> int:
        """T: tokens of a rank in attention."""
        return self.microbatch * self.sequence // self.layout.cp

    @property
    def local_tokens(self) -> int:
        """Ts: tokens of a rank where tensor parallel ranks share the sequence."""
        return self.tokens // self.layout.tp

    @property
    def rows(self) -> int:
        """R: balanced received rows."""
        return self.local_tokens * self.config.top_k

    @property
    def row_width(self) -> int:
        """Of the rows that experts receive."""
        return self.config.latent_width or self.config.width

    def attended(self, window: int) -> float:
        """Tokens that a token attends to, on average: half of the sequence, or those of a window before it."""
        reach = min(window, self.sequence) if window else self.sequence
        return reach * (1 - reach / (2 * self.sequence))

    @property
    def element_bytes(self) -> int:
        return 4 if self.precision == "fp32" else 2

    @property
    def quantized(self) -> bool:
        """Whether products save copies of their inputs in fewer bits."""
        return SAVED_BYTES[self.precision] < self.element_bytes

    def product_input(self, elements: float) -> int:
        """Bytes of a product's input, as it is saved for the weight's gradient."""
        return round(SAVED_BYTES[self.precision] * elements)

    @property
    def stream_bytes(self) -> int:
        """Of the residual stream, which also goes from stage to stage."""
        return self.element_bytes * self.config.width * self.local_tokens

    @property
    def sorts_rows(self) -> bool:
        """Whether received rows are put in the order of experts by a pass of its own, and back again."""
        return self.framework.sorts_rows and self.dispatcher == "alltoall"

    @property
    def room(self) -> int:
        """Device bytes to plan for: without the reserve."""
        return int((1 - self.reserve) * self.cluster.device.memory)

    @property
    def microbatches(self) -> int:
        return self.layout.microbatches(self.global_batch, self.microbatch)

    @property
    def placed(self) -> list[int]:
        """Layers of each stage."""
        if self.placement is None:
            return place_evenly(self.config.layers, self.layout.stages)
        check_placement(self.placement, self.config.layers, self.layout.stages)
        return list(self.placement)
