"""Mixture-of-Experts: router, experts, layer, expert parallelism; dropless, without a host sync."""

from pagestash.moe.allgather import AllGather
from pagestash.moe.alltoall import AllToAll
from pagestash.moe.config import MoEConfig
from pagestash.moe.dispatch import Dispatch, Received
from pagestash.moe.layer import Experts, MoE, SharedExperts
from pagestash.moe.router import Router

__all__ = [
    "AllGather",
    "AllToAll",
    "Dispatch",
    "Experts",
    "MoE",
    "MoEConfig",
    "Received",
    "Router",
    "SharedExperts",
]
