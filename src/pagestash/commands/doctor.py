"""`pagestash doctor`: what this machine has, a line each, and what to install."""

import importlib.metadata
import platform
from collections.abc import Iterator

import torch

import pagestash
from pagestash.kernels.backend import choose
from pagestash.profiling.link import find_link
from pagestash.sizes import format_bytes, host_share, machine_memory

Line = tuple[str, str, str]
"""What it is about, what was found, and what to do; "" if nothing is."""

PACKAGES = (
    ("triton", "torch's builds for a GPU bring it"),
    ("transformers", "pip install 'pagestash[hf]', for models of Hugging Face"),
    ("peft", "pip install peft, for adapters"),
    ("jax", "pip install 'pagestash[jax]', for models in JAX"),
    ("matplotlib", "pip install 'pagestash[plot]', for pictures"),
    ("safetensors", "pip install 'pagestash[train]', for pagestash train"),
)


def run() -> int:
    for about, found, to_do in lines():
        print(f"{about:<13} {found}")
        if to_do:
            print(f"{'':<13} {to_do}")
    return 0


def lines() -> Iterator[Line]:
    yield (
        "pagestash",
        f"{pagestash.__version__}, Python {platform.python_version()}, {platform.machine()}",
        "",
    )
    yield "torch", torch.__version__, ""
    for name, to_do in PACKAGES:
        version = _version(name)
        yield name, version or "missing", "" if version else to_do
    yield (
        "host memory",
        f"{format_bytes(machine_memory())}; offload may pin {format_bytes(host_share())}",
        "",
    )
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "no driver, or no GPU"
        yield "GPU", f"none: {why}", "all runs on the CPU by torch's operations; offload frees nothing"
        return
    for number in range(torch.cuda.device_count()):
        yield from _gpu(torch.device("cuda", number))


def _gpu(device: torch.device) -> Iterator[Line]:
    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)}, sm{major}{minor}"
    full = "other processes hold the rest" if free < 0.9 * total else ""
    yield str(device), f"{name}, {format_bytes(free)} of {format_bytes(total)} free", full
    yield "  kernels", choose(device), "" if choose(device) == "triton" else "install triton for this torch"
    link = find_link(device)
    rates = f"{link.out / 1e9:.0f} GB/s to the host, {link.back / 1e9:.0f} back"
    yield (
        "  link",
        rates,
        "slow: little offload hides behind compute" if min(link.out, link.back) < SLOW else "",
    )


SLOW = 10e9
"""Bytes per second: half of PCIe Gen4 x16."""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
