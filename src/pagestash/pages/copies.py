"""Copies between host memory and the device, all of a group in one call of the CUDA runtime.

`cudaMemcpyBatchAsync` takes eight copies in 10 µs of the host, one call for each takes 34 to 60 (H200). It is used
where torch has loaded CUDA 13, whose form of the function is known here, and after it has copied a few bytes right.
Elsewhere torch copies, and so it does in a capture and on the default stream, which the function refuses.
"""

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from pagestash.torch_internals import current_raw_stream, foreach_copy_, stream_captures

log = logging.getLogger("pagestash")

_RUNTIME = "libcudart.so.13"
_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream: sources are read when the stream is there
_BESIDE_COMPUTE = 1  # cudaMemcpyFlagPreferOverlapWithCompute


class _Location(ctypes.Structure):
    """cudaMemLocation. All zeros: none is given, as none is needed for memory that is pinned or on a device."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    ]


class BatchedCopies:
    """Calls the runtime's function; `call` and `clear_error` are `cudaMemcpyBatchAsync` and `cudaGetLastError`."""

    def __init__(self, call: Callable[..., int], clear_error: Callable[[], int]) -> None:
        self._call = call
        self._clear_error = clear_error
        self._attributes = (_Attributes * 1)()
        self._attributes[0].source_order = _IN_STREAM_ORDER
        self._attributes[0].flags = _BESIDE_COMPUTE
        self._for_all = (ctypes.c_size_t * 1)(0)  # these attributes are those of copy 0 and all behind it
        self._arrays: dict[int, tuple[Any, Any]] = {}

    def start(
        self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], stream: int
    ) -> bool:
        """Whether the copies are on their way; if not, all of them are still to be made."""
        sizes = [source.nbytes for source in sources]
        if not all(sizes):
            return False  # which the function refuses
        count = len(sizes)
        arrays = self._arrays.get(count)
        if arrays is None:
            arrays = self._arrays[count] = (ctypes.c_void_p * count, ctypes.c_size_t * count)
        addresses, lengths = arrays
        status = self._call(
            addresses(*[tensor.data_ptr() for tensor in destinations]),
            addresses(*[tensor.data_ptr() for tensor in sources]),
            lengths(*sizes),
            count,
            self._attributes,
            self._for_all,
            1,
            stream,
        )
        if status:
            self._clear_error()  # or torch would find it behind its next kernel
            log.debug("cudaMemcpyBatchAsync: error %d; torch copies instead", status)
        return not status


def copy_each(
    destinations: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    device: torch.device,
    *,
    wait: bool = False,
) -> None:
    """Copy each source to its destination, on the current stream of `device`; the host does not wait.

    Each pair has the same dtype, sizes and strides, and its elements lie side by side. One of the two is in host
    memory, pinned where the device is a GPU; else the host has to `wait`.
    """
    if device.type == "cuda" and len(sources) > 1 and not wait and not stream_captures():
        batched, stream = _batched(device), current_raw_stream(device.index)
        if batched is not None and stream and batched.start(destinations, sources, stream):
            return
    foreach_copy_(destinations, sources, non_blocking=not wait)


@cache
def _batched(device: torch.device) -> BatchedCopies | None:
    """None where the function is not there, or does not do what is expected of it."""
    if not (torch.version.cuda or "").startswith("13."):
        return None
    try:
        runtime = ctypes.CDLL(_RUNTIME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # which torch has loaded
        call, clear_error = runtime.cudaMemcpyBatchAsync, runtime.cudaGetLastError
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        call.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer]
        batched = BatchedCopies(call, clear_error)
        return batched if copies_right(batched, device) else None
    except (AttributeError, OSError, RuntimeError) as error:  # (of which an OutOfMemoryError is one)
        log.debug("cudaMemcpyBatchAsync cannot be used (%s); torch copies instead", error)
        return None


def copies_right(batched: BatchedCopies, device: torch.device) -> bool:
    """Whether a few bytes arrive on the device and are the same when they are back. Waits for them."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        sent = [torch.full((64,), value, dtype=torch.uint8, device="cpu").pin_memory() for value in (1, 2)]
        here = [torch.zeros_like(each, device=device) for each in sent]
        back = [torch.zeros_like(each).pin_memory() for each in sent]
        started = all(batched.start(*pair, stream.cuda_stream) for pair in ((here, sent), (back, here)))
    stream.synchronize()
    return started and all(map(torch.equal, sent, back))
