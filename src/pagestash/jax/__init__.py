"""Paged stashing for `lax.scan` models in JAX; does not import torch.

from pagestash.jax import Rows, StashPolicy, stash_scan
"""

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError(
        "pagestash.jax needs jax: pip install 'pagestash[jax]', or jax[cuda12] for a GPU", name="jax"
    ) from None

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
