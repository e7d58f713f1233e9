"""The names of a model's modules, as its author knows them, whatever it was wrapped in since."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What `torch.compile`, FSDP and activation checkpointing call the module that they stand around."""


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules inside `model` by name, without the parts of a name that a wrapper added.

    A wrapped module and its wrapper have one name. It is the wrapper's, the outermost: what hangs on it is outside.
    """
    found: dict[str, nn.Module] = {}
    plain = {"": ""}
    parallel = set()
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            parallel.add(name)
        if name:
            above, _, last = name.rpartition(".")
            wrapped = last in WRAPPERS or (last == "module" and above in parallel)
            outside = plain[above]
            plain[name] = outside if wrapped else f"{outside}.{last}" if outside else last
        if plain[name]:
            found.setdefault(plain[name], module)
    return found


def prefixes(name: str) -> list[str]:
    """The names of the modules that a dotted name leads through."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
