"""Paged stashing for `lax.scan` models in JAX; does not import torch.

from pagestash.jax import Rows, StashPolicy, stash_scan
"""

from .overflow import StashOverflow
from .policy import Rows, StashPolicy, StashReport
from .scan import stash_scan
from .sizing import buffer_bytes, expected_rows, plan, worst_case_rows

__all__ = [
    "Rows",
    "StashOverflow",
    "StashPolicy",
    "StashReport",
    "buffer_bytes",
    "expected_rows",
    "plan",
    "stash_scan",
    "worst_case_rows",
]
