"""The device that a user names."""

import torch


def find_device(name: str, option: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device that is here; `option` is how an error calls it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{option}: expected auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{option}: there is no GPU here")
    return device
