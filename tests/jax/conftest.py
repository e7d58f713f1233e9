"""Four virtual CPU devices and quick compilation; nothing is collected where jax is not installed."""

import importlib.util
import os
import sys

# This folder is called jax too, and an empty name would be found as a namespace package: jaxlib tells.
HAS_JAX = importlib.util.find_spec("jaxlib") is not None
# Level 0 leaves XLA's own passes as they are and has LLVM do less: compiling is most of these tests' time.
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"

if not HAS_JAX:
    collect_ignore_glob = ["test_jax_*.py"]
elif "jax" not in sys.modules and "xla_force_host_platform" not in os.environ.get("XLA_FLAGS", ""):
    # XLA reads its flags once, when jax first asks for its devices.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
