"""Who multiplies, and what a backend must offer.

R rows in expert order, E experts, D the model's width, N an expert's, H = 2N.
"""

import os
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from pagestash.kernels.gemm.grouped import TorchProducts
from pagestash.kernels.gemm.rows import Rows
from pagestash.kernels.gemm.tiles import CAPABILITY

ENVIRONMENT = "PAGESTASH_GEMM"
ALIGNED = 8
"""Elements of bf16 in 16 bytes: the copy engine of a multiprocessor (TMA) takes rows of multiples of that."""


class Products(Protocol):
    """Grouped products of rows by an expert's matrix; `bounds` [E + 1] says where each expert's rows begin and end.

    Nothing waits for the host. `paired` is of a first projection whose columns, or their gradients', stand in pairs
    (gate 0, linear 0, gate 1, …) although its weight has all gates first: what `up_gated` makes.
    """

    name: str

    def gates(self, rows: int, up_EHD: torch.Tensor) -> bool:
        """Whether `up_gated` can be asked for this many rows: one kernel makes both."""
        ...

    def up_gated(
        self, x: Rows, up_EHD: torch.Tensor, bounds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`h_RH = x · upᵀ`, paired, and `silu(gate) · linear` [R, N] of it."""
        ...

    def forward(self, rows: Rows, weight_EOI: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """[R, O]: `rows · weightᵀ`."""
        ...

    def input_gradient(
        self, dy: Rows, weight_EOI: torch.Tensor, bounds: torch.Tensor, *, paired: bool = False
    ) -> torch.Tensor:
        """[R, I]: `dy · weight`."""
        ...

    def weight_gradient(
        self, dy: Rows, x: Rows, bounds: torch.Tensor, *, paired: bool = False, turned: bool = False
    ) -> torch.Tensor:
        """[E, O, I]: `dyᵀ · x` of each expert's rows; zeros without any. At most one of both is `TokenRows`.

        `turned` has it stored as [E, I, O], as the weight is.
        """
        ...


TORCH: Products = TorchProducts()


def products_for(like: torch.Tensor, *sides: int) -> Products:
    """The backend for rows of the dtype and on the device of `like`, by matrices of these sides."""
    if _why_torch(like.device, like.dtype) is not None or any(side % ALIGNED for side in sides):
        return TORCH
    return _quack()


def described(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """Who multiplies on `device`, and why not another."""
    why = _why_torch(device, dtype)
    return f"torch ({why})" if why else f"quack {_quack_version()}"


def _why_torch(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps products from quack; None: nothing."""
    if dtype != torch.bfloat16:
        return f"quack multiplies bf16 here, not {str(dtype).removeprefix('torch.')}"
    return _why_not_quack(device)


@cache
def _why_not_quack(device: torch.device) -> str | None:
    wanted = os.environ.get(ENVIRONMENT, "")
    if wanted not in ("", "torch", "quack"):
        raise ValueError(f"{ENVIRONMENT}={wanted!r}: expected 'torch', 'quack' or nothing")
    if wanted == "torch":
        return f"{ENVIRONMENT}=torch"
    why = None
    if device.type != "cuda":
        why = f"quack needs a GPU, not {device.type}"
    elif (found := torch.cuda.get_device_capability(device)) != CAPABILITY:
        why = f"tiles for quack are known for sm{CAPABILITY[0]}{CAPABILITY[1]}, not sm{found[0]}{found[1]}"
    elif find_spec("quack") is None:
        why = "quack is not installed: pip install 'pagestash[quack]'"
    if why and wanted == "quack":
        raise ValueError(f"{ENVIRONMENT}=quack: {why}")
    return why


@cache
def _quack() -> Products:
    from pagestash.kernels.gemm.quack import QuackProducts

    return QuackProducts()


def _quack_version() -> Any:
    from importlib.metadata import version

    return version("quack-kernels")
