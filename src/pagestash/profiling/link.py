"""Rates of copies: over the link to the host, and on the device."""

from dataclasses import dataclass, replace

import torch

LINK = 50e9
"""Bytes per second each way, if there is no GPU to measure: PCIe Gen5 x16 with both directions busy."""
COPY = 1.8e12
"""Bytes per second of a copy on the device, if there is none to measure: 1 GiB in 0.6 ms, as on an H200."""
SAMPLE = 256 << 20
ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second: `out` to the host, `back` from it, and `copy` on the device."""

    out: float = LINK
    back: float = LINK
    copy: float = COPY
    measured: bool = False

    def __post_init__(self) -> None:
        for name in ("out", "back", "copy"):
            if not getattr(self, name) > 0:
                raise ValueError(f"link {name}={getattr(self, name)}: expected bytes per second, more than 0")

    def at(self, part: float) -> "Link":
        """A link that moves this part as much to the host and back."""
        return replace(self, out=part * self.out, back=part * self.back)


def find_link(device: torch.device, given: float | Link | None = None) -> Link:
    """The link of `device`: given, measured on a GPU, or the constants above."""
    if isinstance(given, Link):
        return given
    if given is not None:
        return Link(out=float(given), back=float(given))
    return _measure(device) if device.type == "cuda" else Link()


def _measure(device: torch.device) -> Link:
    """Measure copies between pinned and device memory each way, by the copy engine, and on the device."""
    with torch.cuda.device(device):
        near = torch.empty(SAMPLE, dtype=torch.uint8, device=device)
        beside = torch.empty_like(near)
        far = torch.empty(SAMPLE, dtype=torch.uint8, pin_memory=True)
        return Link(_rate(far, near), _rate(near, far), _rate(beside, near), measured=True)


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    target.copy_(source, non_blocking=True)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(ROUNDS):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return ROUNDS * SAMPLE / (start.elapsed_time(end) / 1e3)
