"""Which implementation of an operation runs: Triton where it can, else the torch reference."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Literal

import torch

__all__ = [
    "HAS_TRITON",
    "Backend",
    "cdiv",
    "choose",
    "described_tensor",
    "interpreted",
    "launch",
    "multiprocessors",
    "on_device",
    "power_of_two",
    "sum_dtype",
    "tl",
    "triton",
]

Backend = Literal["triton", "torch"]

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU build of torch: kernels below stay plain functions that nobody calls

    class _NoTriton:
        """Lets a file define its kernels without triton; launching one is refused by `choose`."""

        @staticmethod
        def jit(*args: Any, **_: Any) -> Any:
            return args[0] if args else lambda function: function

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

    triton = tl = _NoTriton()

_HERE = nullcontext()

HAS_TRITON = not isinstance(triton, type) and hasattr(triton, "__version__")


def interpreted() -> bool:
    """Whether Triton kernels run on the CPU (`TRITON_INTERPRET=1` when this package was imported)."""
    return HAS_TRITON and bool(triton.knobs.runtime.interpret)


def choose(device: torch.device, backend: str = "auto") -> Backend:
    """The backend for tensors on `device`; `"auto"` is Triton on CUDA, and on the CPU when interpreted."""
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"backend={backend!r}: expected 'auto', 'triton' or 'torch'")
    can_triton = HAS_TRITON and (device.type == "cuda" or interpreted())
    if backend == "triton" and not can_triton:
        reason = "triton is not installed" if not HAS_TRITON else "on a CPU it needs TRITON_INTERPRET=1"
        raise ValueError(f"backend='triton' cannot run on {device}: {reason}")
    if backend == "auto":
        return "triton" if can_triton else "torch"
    return "triton" if backend == "triton" else "torch"


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, /, *operands: Any, **constants: Any
) -> None:
    """Start `kernel` on `device`, where its tensors are. All our kernels are started here.

    Triton takes the current device and its current stream, which may be another's: the kernel would then read the
    addresses of one GPU on the other, and in no order with what wrote there.

    An error that comes with the launch says in a note which kernel it was. What a kernel does wrong while it runs
    shows at some later call; with CUDA_LAUNCH_BLOCKING=1 at its own.
    """
    try:
        with on_device(device):
            kernel[grid](*operands, **constants)
    except Exception as error:
        error.add_note(f"in {kernel.__module__}.{kernel.__name__} on {device}, grid {grid}")
        raise


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """What is launched inside goes to `device`, whichever is current."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def described_tensor(tensor: torch.Tensor, block: list[int]) -> Any:
    """`tensor` for a kernel that reads it in whole blocks by the copy engine of a multiprocessor (TMA)."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, block)


def cdiv(value: int, by: int) -> int:
    """`value / by`, rounded up. (`triton.cdiv` costs the host 5 µs.)"""
    return -(-value // by)


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`. (`triton.next_power_of_2` costs 5 µs, too.)"""
    return 1 << (value - 1).bit_length()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums are made, in torch as in the kernels."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`; 1 on a CPU, where the interpreter runs programs one by one."""
    if device.type != "cuda":
        return 1
    return _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
