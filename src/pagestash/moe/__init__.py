"""Mixture-of-Experts: router, experts, layer, expert parallelism; dropless, without a host sync."""

from pagestash.moe.config import MoEConfig
from pagestash.moe.experts import Experts
from pagestash.moe.layer import MoE
from pagestash.moe.parallel.allgather import AllGather
from pagestash.moe.parallel.alltoall import AllToAll
from pagestash.moe.parallel.dispatch import Dispatch, Received
from pagestash.moe.parallel.overlap import overlap, step_in_halves
from pagestash.moe.parallel.sorted import SortedRows
from pagestash.moe.parts import ExpertFC1, ExpertFC2, MoEAct
from pagestash.moe.router import Router
from pagestash.moe.shared import SharedExperts

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
    "SortedRows",
    "overlap",
    "step_in_halves",
]
