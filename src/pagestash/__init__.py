"""pagestash: activation memory for Mixture-of-Experts training.

The names below are imported on first use, so that `pagestash.jax` never loads torch and the command line
answers `--help` at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0.dev0"

if TYPE_CHECKING:
    from pagestash.keeper import Keeper as Keeper
    from pagestash.pages.pool import PagePool as PagePool
    from pagestash.planning.make import plan as plan
    from pagestash.planning.result import Plan as Plan
    from pagestash.policy import Policy as Policy
    from pagestash.policy import PoolConfig as PoolConfig
    from pagestash.policy import Rule as Rule
    from pagestash.profiling.measure import profile as profile
    from pagestash.profiling.result import Profile as Profile
    from pagestash.saved.overflow import PoolOverflow as PoolOverflow
    from pagestash.saved.recompute.once import once as once
    from pagestash.saved.region import region as region
    from pagestash.saved.rows.declare import rows as rows
    from pagestash.step.graphed import GraphedStep as GraphedStep
    from pagestash.verifying.result import Verification as Verification
    from pagestash.verifying.verify import verify as verify

_FOUND_IN = {
    "GraphedStep": "pagestash.step.graphed",
    "Keeper": "pagestash.keeper",
    "PagePool": "pagestash.pages.pool",
    "Plan": "pagestash.planning.result",
    "Policy": "pagestash.policy",
    "PoolConfig": "pagestash.policy",
    "PoolOverflow": "pagestash.saved.overflow",
    "Profile": "pagestash.profiling.result",
    "Rule": "pagestash.policy",
    "Verification": "pagestash.verifying.result",
    "once": "pagestash.saved.recompute.once",
    "plan": "pagestash.planning.make",
    "profile": "pagestash.profiling.measure",
    "region": "pagestash.saved.region",
    "rows": "pagestash.saved.rows.declare",
    "verify": "pagestash.verifying.verify",
}

_SUBPACKAGES = ("models", "moe", "pipeline", "planning", "profiling")

__all__ = ["__version__", *sorted(_FOUND_IN), *_SUBPACKAGES]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    try:
        module = _FOUND_IN[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
