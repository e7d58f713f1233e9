"""The records of a profile, the same in memory and in JSON."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from pagestash.saved.storage import SPARSE

Kind = Literal["activation", "weight_cast", "input", "weight", "weight_view", "buffer"]
ALLOCATED: tuple[Kind, ...] = ("activation", "weight_cast")
"""Kinds whose memory the step allocates and holds for backward."""

Way = Literal["forward", "backward"]

Gradients = Literal["held", "fresh"]
"""Whether a step finds gradients in place, and adds to them, or finds none."""

BATCH, OUTPUT, USER = "the batch", "the model's output", "user code"


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that an operation saved for backward.

    Several tensors may share a storage: its bytes are `counted` with the first of them.
    """

    region: str
    """The innermost module or `ps.region` that ran, or the one that a fused operation claims; "" is the model."""
    path: tuple[str, ...]
    """The regions around it, outermost first, and the region."""
    shape: tuple[int, ...]
    dtype: str
    device: str
    kind: Kind
    """`weight_view`: another view of a weight's memory. `weight_cast`: new memory computed from weights alone."""
    bytes: int
    """Bytes of its elements, each once."""
    storage: int
    """The number of its storage in this profile."""
    storage_bytes: int
    counted: int
    """The storage's bytes the first time it is saved; 0 after that, and if the step did not allocate it (weights,
    buffers, the batch)."""
    valid_bytes: int
    """Bytes of the storage that backward reads, without rows past the valid ones."""
    held_by: tuple[str, ...]
    """What else holds the storage at the end of forward: other regions, a module's output, user code."""
    saved_at: int
    """The segment of forward that saved it."""
    needed_at: int
    """The segment of backward that first needed the storage (that which freed it, if none did)."""
    freed_at: int
    """The segment of backward in which the storage was freed."""
    request: int
    """The number of the first request for the storage, of all in backward."""
    span: tuple[int, int]
    """The first byte of the storage that it has, and the end."""
    asked: tuple[int, int]
    """When backward first asked for this tensor, whoever else saved its storage: the segment (the last, if nobody
    did), and the number of the request."""
    done_at: int
    """The segment of backward in which this tensor was let go of."""
    beside_bytes: int | None = None
    """Bytes allocated beside saved tensors when backward first needed the storage, relative to the start of the
    step; None if memory was not read."""
    once: bool = False
    """Whether `ps.once` saved it: no replay of a region around brings it back."""
    claimed: bool = False
    """Whether a fused operation claims it: under a rule of the module that it is claimed for, it moves apart from
    what else its region saves, and before that."""
    has_rows: bool = False
    """Of a claimed tensor: whether the claim says how many of its rows are valid. It then moves apart under any
    rule."""
    block: str = ""
    """The innermost `ps.region` or fused operation around it. It leaves when that ends, also by the rule of a
    module around. "" if there is none."""
    claim: int = 0
    """The place of its claim among those of the fused operation: what they claim moves in this order."""

    @property
    def elsewhere(self) -> bool:
        """Whether anything but saved tensors holds the storage, so that no home could free it."""
        return _is_elsewhere(self.held_by)

    @property
    def is_thin(self) -> bool:
        """Whether it is a thin slice of what it spans: a keeper then moves a copy of its elements."""
        first, last = self.span
        return last - first > SPARSE * self.bytes

    @property
    def movable(self) -> bool:
        """Whether its storage is counted here and a home could free it."""
        return self.counted > 0 and not self.elsewhere


@lru_cache(maxsize=2**12)  # asked for every tensor of every policy that is predicted
def _is_elsewhere(held_by: tuple[str, ...]) -> bool:
    return any(name.startswith(("output of ", BATCH, OUTPUT, USER)) for name in held_by)


@dataclass(frozen=True, slots=True)
class HomeEstimate:
    """Bytes of a region that a home would save, and the seconds per step that it would cost."""

    saved_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Region:
    """One region of the step: what was saved in it, and how long it ran.

    `forward_seconds` and `backward_seconds` exclude inner regions; the totals include them. A region that a fused
    operation claims has no time: `within` is the region that ran, and copies hide behind that one's time.
    """

    name: str
    path: tuple[str, ...]
    calls: int
    within: str
    tensors: int
    bytes: int
    """Bytes of the storages that this region saved first."""
    forward_seconds: float
    backward_seconds: float
    total_bytes: int
    total_forward_seconds: float
    total_backward_seconds: float
    hidden_bytes: int
    """`min(forward_seconds × link.out, backward_seconds × link.back)`, of the region `within`."""
    inputs: tuple[int, ...] = ()
    """Saved storages that are inputs of the region, or results of `ps.once` in it."""
    outputs: tuple[int, ...] = ()
    """Saved storages that are outputs of the region."""
    unsaved_inputs: tuple[tuple[int, int], ...] = ()
    """Inputs that no operation saves, and that only `recompute` would hold: storage and bytes."""
    unsaved_outputs: tuple[tuple[int, int], ...] = ()
    """Floating-point outputs that are such an input of another region: storage and bytes."""
    homes: dict[str, HomeEstimate] = field(default_factory=dict)
    """By home. `recompute` includes inner regions, the others do not."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the step in which the same regions run."""

    path: tuple[str, ...]
    way: Way
    seconds: float
    end_bytes: int | None = None
    """Bytes allocated at its end, relative to the start of the step; None if memory was not read."""
    peak_bytes: int | None = None
    """The most bytes allocated in it, relative to the start of the step."""
    host_seconds: float | None = None
    """The host's time to launch it; None on a CPU."""
    waiting_bytes: int = 0
    """Gradients that a split backward would hold from here until its second half; 0 if the batch wants none."""

    @property
    def region(self) -> str:
        return self.path[-1]
