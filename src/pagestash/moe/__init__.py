"""Mixture-of-Experts: router, experts, layer, expert parallelism; dropless, without a host sync."""

from pagestash.moe.allgather import AllGather
from pagestash.moe.alltoall import AllToAll
from pagestash.moe.config import MoEConfig
from pagestash.moe.dispatch import Dispatch, Received
from pagestash.moe.experts import Experts, SharedExperts
from pagestash.moe.layer import MoE
from pagestash.moe.parts import ExpertFC1, ExpertFC2, MoEAct
from pagestash.moe.router import Router

__all__ = [
    "AllGather",
    "AllToAll",
    "Dispatch",
    "ExpertFC1",
    "ExpertFC2",
    "Experts",
    "MoE",
    "MoEAct",
    "MoEConfig",
    "Received",
    "Router",
    "SharedExperts",
]
