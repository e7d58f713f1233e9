"""Four virtual CPU devices and quick compilation; nothing is collected where jax is not installed."""

import importlib.metadata
import importlib.util
import os
import sys

# This folder is called jax too, and would be found as a namespace package where jax is missing: jaxlib tells.
HAS_JAX = importlib.util.find_spec("jaxlib") is not None


def quick_flags() -> str:
    """Compiling is most of these tests' time. XLA's passes stay as they are; code generation does less."""
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    # XLA ends the process over a flag it does not know, so this one goes only where it was seen to exist.
    seen = importlib.metadata.version("jaxlib").startswith("0.10.")
    return f"{flags} --xla_cpu_use_fusion_emitters=false" if seen else flags


if not HAS_JAX:
    collect_ignore_glob = ["test_jax_*.py"]
elif "jax" not in sys.modules and "xla_force_host_platform" not in os.environ.get("XLA_FLAGS", ""):
    # XLA reads its flags once, when jax first asks for its devices.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick_flags()}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
