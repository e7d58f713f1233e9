"""What a profile is made of: plain records, the same in memory and in JSON."""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["activation", "weight_cast", "input", "weight", "weight_view", "buffer"]
ALLOCATED: tuple[Kind, ...] = ("activation", "weight_cast")
"""Kinds whose memory the step itself took, and holds for backward."""

Way = Literal["forward", "backward"]

BATCH, OUTPUT, USER = "the batch", "the model's output", "user code"


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that an operation saved for backward.

    Several tensors may lie in one storage: its bytes are `counted` with the first of them.
    """

    region: str
    """The innermost module or `ps.region` that was running, or that a fused operation names; "" is the model."""
    path: tuple[str, ...]
    """The regions around it, outermost first, and itself."""
    shape: tuple[int, ...]
    dtype: str
    device: str
    kind: Kind
    """`weight_view`: another view of a weight's memory. `weight_cast`: new memory made from weights alone."""
    bytes: int
    """Of its elements, each once."""
    storage: int
    """A number for its storage within this profile."""
    storage_bytes: int
    counted: int
    """The storage's bytes where it is saved for the first time; 0 after that, and where the step did not
    allocate it (weights, buffers, the batch)."""
    valid_bytes: int
    """Of the storage: bytes that backward reads, without rows past the valid ones."""
    held_by: tuple[str, ...]
    """Who else keeps the storage alive at the end of forward: other regions, a module's output, user code."""
    saved_at: int
    """The segment of forward that saved it."""
    needed_at: int
    """The segment of backward that first asked for the storage (the last, where none did)."""
    freed_at: int
    """The segment of backward after which the storage was let go."""

    @property
    def elsewhere(self) -> bool:
        """Whether something that is no saved tensor holds the storage, so that no home could free it."""
        return any(name.startswith(("output of ", BATCH, OUTPUT, USER)) for name in self.held_by)

    @property
    def movable(self) -> bool:
        """Whether a home could free its storage, counted here."""
        return self.counted > 0 and not self.elsewhere


@dataclass(frozen=True, slots=True)
class HomeEstimate:
    """What a home would save of a region's bytes, and the seconds of a step it would cost."""

    saved_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Region:
    """One region of the step: what was saved in it, and how long it ran.

    `forward_seconds` and `backward_seconds` are its own; the totals include regions inside it. A region that a
    fused operation saved for has no time of its own: `within` is the one that ran, and what it could hide.
    """

    name: str
    path: tuple[str, ...]
    calls: int
    within: str
    tensors: int
    bytes: int
    """Counted here: storages that this region saved first."""
    forward_seconds: float
    backward_seconds: float
    total_bytes: int
    total_forward_seconds: float
    total_backward_seconds: float
    hidden_bytes: int
    """What the link could move out behind its forward, and back behind its backward: the smaller."""
    inputs: tuple[int, ...] = ()
    """Storages that came in, of those that were saved."""
    outputs: tuple[int, ...] = ()
    homes: dict[str, HomeEstimate] = field(default_factory=dict)
    """By home. `recompute` is for the region with all that is inside, the others for what is its own."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the step in which the same regions were running."""

    path: tuple[str, ...]
    way: Way
    seconds: float

    @property
    def region(self) -> str:
        return self.path[-1]
