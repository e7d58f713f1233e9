"""The names of a model's modules, without what wrappers add to them."""

from collections.abc import Iterator

from torch import nn

from pagestash.torch_internals import WRAPPERS, children_of

ADAPTERS = {"base_model": "PeftModel", "model": "BaseTuner"}
"""What PEFT calls the model that it stands around, and the class of the one that stands there."""
FABRIC = "_forward_module"
"""What Lightning's Fabric calls the model inside its wrapper, which also has it under another name."""
ONLY = "module"
"""What wrappers of a whole model call it, their only child: those of torch, Megatron, DeepSpeed and of users."""
ADAPTED = "base_layer"
"""What PEFT calls the layer inside an adapter."""


def plain_names(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules of `model` with their names, without the parts of a name that a wrapper added.

    A wrapped module and its wrapper have one name, and come in this order: the wrapper, what it wraps. The layer
    inside an adapter has a name of its own, `q_proj.base_layer`; modules inside that layer have the names that
    they would have without the adapter.
    """
    known = {"": ("", "", model)}  # the name, what stands before the names of children, the module
    adapted: dict[str, str] = {}  # the names of adapters' layers without the adapters
    for name, module in model.named_modules():
        if name:
            above, _, last = name.rpartition(".")
            outer, prefix, holder = known[above]
            plain = (
                prefix
                if _wraps(holder, last, outermost=not outer)
                else f"{prefix}.{last}"
                if prefix
                else last
            )
            before = plain
            if last == ADAPTED and _is_peft(holder, "BaseTunerLayer"):
                adapted[name] = adapted.get(above, outer)
                before = plain if _is_peft(module, "BaseTunerLayer") else adapted[name]
            known[name] = plain, before, module
        yield known[name][0], module


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules inside `model` by their plain names; of a wrapper and what it wraps, the wrapper.

    What hangs on the outermost is outside.
    """
    found: dict[str, nn.Module] = {}
    for name, module in plain_names(model):
        if name:
            found.setdefault(name, module)
    return found


def _wraps(holder: nn.Module, child: str, *, outermost: bool) -> bool:
    """Whether `holder` is a wrapper around its child of that name."""
    if child in WRAPPERS or child == FABRIC:
        return True
    if child == ONLY:
        return outermost and len(children_of(holder)) == 1
    return child in ADAPTERS and _is_peft(holder, ADAPTERS[child])


def _is_peft(module: nn.Module, name: str) -> bool:
    """Whether `module` is of PEFT's class of that name, which need not be installed."""
    return any(kind.__name__ == name and kind.__module__.startswith("peft.") for kind in type(module).__mro__)


def prefixes(name: str) -> list[str]:
    """The names of the modules that contain the module of a dotted name, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
