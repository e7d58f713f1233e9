"""Hugging Face transformers: our kernels in its models. Import it as `pagestash.hf`.

Importing registers the experts implementation `"pagestash"` and the dispatch of its expert parallelism, and so
imports transformers. Models with another implementation run as before.
"""

from importlib.metadata import PackageNotFoundError, version

OLDEST = (5, 7)
"""The first release of transformers that takes an experts implementation by any registered name."""


def _check_installed() -> None:
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise ImportError(
            "pagestash.hf needs transformers 5.7 or later: pip install 'pagestash[hf]'"
        ) from None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ImportError(f"pagestash.hf needs transformers 5.7 or later, and {found} is installed")


_check_installed()

from pagestash.integrations.hf import experts as _experts  # noqa: E402 (after the check, which says it better)
from pagestash.integrations.hf.expert_parallel import OverCapacity, expert_parallel  # noqa: E402
from pagestash.integrations.hf.expert_parallel import register as _register_dispatch  # noqa: E402
from pagestash.integrations.hf.optimize import optimize  # noqa: E402
from pagestash.integrations.hf.report import Report  # noqa: E402
from pagestash.integrations.hf.trainer import unwrap, wrap  # noqa: E402

_experts.register()
_register_dispatch()

__all__ = ["OverCapacity", "Report", "expert_parallel", "optimize", "unwrap", "wrap"]
