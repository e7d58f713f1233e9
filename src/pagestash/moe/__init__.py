"""Mixture-of-Experts: router, experts, layer, expert parallelism; dropless, without a host sync."""

from typing import TYPE_CHECKING

from pagestash.lazy import lazily

if TYPE_CHECKING:
    from pagestash.moe.config import MoEConfig as MoEConfig
    from pagestash.moe.experts import Experts as Experts
    from pagestash.moe.layer import MoE as MoE
    from pagestash.moe.parallel.allgather import AllGather as AllGather
    from pagestash.moe.parallel.alltoall import AllToAll as AllToAll
    from pagestash.moe.parallel.dispatch import Dispatch as Dispatch
    from pagestash.moe.parallel.dispatch import Received as Received
    from pagestash.moe.parallel.overlap import overlap as overlap
    from pagestash.moe.parallel.overlap import step_in_halves as step_in_halves
    from pagestash.moe.parallel.sorted import SortedRows as SortedRows
    from pagestash.moe.parts import ExpertFC1 as ExpertFC1
    from pagestash.moe.parts import ExpertFC2 as ExpertFC2
    from pagestash.moe.parts import MoEAct as MoEAct
    from pagestash.moe.router import Router as Router
    from pagestash.moe.shared import SharedExperts as SharedExperts

_FOUND_IN = {
    "AllGather": "pagestash.moe.parallel.allgather",
    "AllToAll": "pagestash.moe.parallel.alltoall",
    "Dispatch": "pagestash.moe.parallel.dispatch",
    "ExpertFC1": "pagestash.moe.parts",
    "ExpertFC2": "pagestash.moe.parts",
    "Experts": "pagestash.moe.experts",
    "MoE": "pagestash.moe.layer",
    "MoEAct": "pagestash.moe.parts",
    "MoEConfig": "pagestash.moe.config",
    "Received": "pagestash.moe.parallel.dispatch",
    "Router": "pagestash.moe.router",
    "SharedExperts": "pagestash.moe.shared",
    "SortedRows": "pagestash.moe.parallel.sorted",
    "overlap": "pagestash.moe.parallel.overlap",
    "step_in_halves": "pagestash.moe.parallel.overlap",
}
__all__ = sorted(_FOUND_IN)
__getattr__ = lazily(__name__, _FOUND_IN)
