"""The names of a model's modules, without what wrappers add to them."""

from collections.abc import Iterator

from torch import nn

from pagestash.torch_internals import WRAPPERS

ADAPTERS = {"base_model": "PeftModel", "model": "BaseTuner"}
"""What PEFT calls the model that it stands around, and the class of the one that stands there."""
INSIDE: dict[str, dict[str, tuple[str, ...]]] = {
    "module": {
        "DistributedDataParallel": ("torch.", "megatron."),
        "Float16Module": ("megatron.",),
        "DeepSpeedEngine": ("deepspeed.",),
    },
    "_forward_module": {"_FabricModule": ("lightning.", "lightning_fabric.")},
}
"""What frameworks call the model inside their wrappers, the wrapper's class, and the packages that have it."""
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
            plain = prefix if _wraps(holder, last) else f"{prefix}.{last}" if prefix else last
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


def _wraps(holder: nn.Module, child: str) -> bool:
    """Whether `holder` is a wrapper around its child of that name."""
    if child in WRAPPERS:
        return True
    if child in INSIDE:
        return any(_is(holder, name, whose) for name, whose in INSIDE[child].items())
    return child in ADAPTERS and _is_peft(holder, ADAPTERS[child])


def _is_peft(module: nn.Module, name: str) -> bool:
    return _is(module, name, ("peft.",))


def _is(module: nn.Module, name: str, whose: tuple[str, ...]) -> bool:
    """Whether `module` is of the class of that name in one of these packages, which need not be installed."""
    return any(kind.__name__ == name and kind.__module__.startswith(whose) for kind in type(module).__mro__)


def prefixes(name: str) -> list[str]:
    """The names of the modules that contain the module of a dotted name, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
