"""The compute stream of a step is one: homes that move bytes hand memory on in its order."""

import torch

from pagestash.torch_internals import current_stream_ids


class OneStream:
    """Refuses tensors of a second stream."""

    def __init__(self) -> None:
        self._index: int | None = None
        self._first: tuple[int, int, int] | None = None

    def start(self, device: torch.device | None) -> None:
        """A step begins; the first tensor that moves says which stream it is."""
        self._index = device.index if device is not None and device.type == "cuda" else None
        self._first = None

    def check(self, region: str) -> None:
        """A tensor of `region` is saved now, or is about to move."""
        if self._index is None:
            return
        here = current_stream_ids(self._index)
        if here == self._first:
            return
        if self._first is not None:
            raise RuntimeError(
                f"region {region!r} saves tensors on another CUDA stream than others of the step. Stash, offload "
                "and bits=8 hand memory on in the order of one stream: give the region the home keep, or recompute "
                "inside no region that moves its input; or run it on the stream of the others"
            )
        self._first = here
