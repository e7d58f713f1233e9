"""What an MoE layer is made of."""

from dataclasses import dataclass
from typing import Literal

from pagestash.kernels.moe.activation import Activation, ActivationName, as_activation


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSettings:
    """What the configuration of one MoE layer and that of a whole decoder have in common."""

    width: int
    expert_width: int
    experts: int
    top_k: int
    shared_experts: int = 0
    """Experts that see every token, as one of `shared_experts` times the width."""
    activation: ActivationName | Activation = "silu"
    """By name, or one with parameters of your own."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    """Whether a token's weights are divided by their sum."""
    route_scale: float = 1.0
    correction_bias: bool = False
    """A bias on the selection alone, moved by `Router.update_bias` towards an even load (DeepSeek-V3)."""
    groups: int = 1
    group_limit: int = 1
    """With more than one group of experts, a token's experts come from its best `group_limit` groups."""
    balance_loss: float = 0.0
    z_loss: float = 0.0

    capacity: int | None = None
    """Rows that a layer's expert buffers hold; None: as many as can arrive."""
    expected_rows: int | Literal["auto"] = 0
    """Rows that usually arrive over a dispatch, at most `capacity`: these stay in buffers of that size, and under
    a stash rule only rows beyond them are copied to pages. An even load is tokens a rank times `top_k`. "auto": a
    `ps.Keeper` chooses the number from what arrived, and again when that drifts; without a stash rule it is 0."""

    @property
    def gated(self) -> bool:
        """Whether the first projection has a gate and a linear part, so that it is twice as wide as an expert."""
        return as_activation(self.activation).gated

    def __post_init__(self) -> None:
        for name in ("width", "expert_width", "experts", "top_k", "groups", "group_limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k}: there are only experts={self.experts}")
        as_activation(self.activation)
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"score={self.score!r}: expected 'softmax' or 'sigmoid'")
        if self.experts % self.groups:
            raise ValueError(f"groups={self.groups} does not divide experts={self.experts}")
        if self.group_limit > self.groups:
            raise ValueError(f"group_limit={self.group_limit}: there are only groups={self.groups}")
        if self.group_limit * (self.experts // self.groups) < self.top_k:
            raise ValueError(
                f"top_k={self.top_k}: {self.group_limit} groups of {self.experts // self.groups} hold fewer"
            )
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(f"capacity={self.capacity}: expected at least 1 row")
        rows = self.expected_rows
        if rows != "auto" and (isinstance(rows, str) or rows < 0):
            raise ValueError(f"expected_rows={rows!r}: expected 0 or more, or 'auto'")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(ExpertSettings):
    """Shapes and choices of one layer; see `MoE`.

    MoEConfig(width=2048, expert_width=768, experts=128, top_k=8)
    """

    bias: bool = False
    """Biases on both projections of the routed experts."""
    drop: bool = False
    """Whether rows beyond the capacity are dropped without raising `over_capacity`."""

    def __post_init__(self) -> None:
        ExpertSettings.__post_init__(self)  # (a class with slots has no super() here)
        if self.drop and self.capacity is None:
            raise ValueError("drop=True needs a capacity to drop beyond")
