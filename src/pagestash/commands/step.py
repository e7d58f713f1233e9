"""The step that `pagestash profile`, `plan` and `verify` run: its options, its model and its batch."""

import importlib
import inspect
import sys
from typing import Any, cast

import torch
from torch import nn

from pagestash.commands.checks import check_numbers
from pagestash.commands.options import MeasuredOptions, StepOptions
from pagestash.device import device_memory, find_device
from pagestash.models.config import preset
from pagestash.models.decoder import Decoder, count_parameters
from pagestash.policy import Policy
from pagestash.profiling.measure import profile, repeated_step
from pagestash.profiling.records import Gradients
from pagestash.profiling.result import Profile
from pagestash.profiling.steps import RepeatedStep
from pagestash.sizes import format_bytes, machine_memory, parse_bytes
from pagestash.torch_internals import tree_map_only

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def measure(options: MeasuredOptions, policy: Policy | None = None) -> tuple[Profile, RepeatedStep]:
    """Profile what the options name; the profile has the policy's homes. Also the step that was profiled."""
    link = given_link(options)
    model, batch, autocast = make_step(options)
    gradients = cast(Gradients, options.gradients)
    found = profile(
        model,
        batch,
        policy=policy,
        link=link,
        autocast=autocast,
        repeats=options.repeats,
        gradients=gradients,
        progress=True,
    )
    return found, repeated_step(model, batch, autocast=autocast, gradients=gradients)


def make_step(options: StepOptions) -> tuple[nn.Module, Any, torch.dtype | None]:
    """The model that the options name, its batch, and the dtype of autocast."""
    _check(options)
    device = find_device(options.device, f"--device {options.device}")
    text = 8 * options.batch * (options.tokens + 1)
    if text > device_memory(device):
        raise ValueError(
            f"--batch {options.batch} --seq {options.tokens}: the tokens alone take {format_bytes(text)}, {device} "
            f"has {format_bytes(device_memory(device))}"
        )
    autocast = None if options.autocast is None else _dtype("--autocast", options.autocast)
    model, batch = _from_module(options, device) if options.module else _from_preset(options, device)
    return model, batch, autocast


def given_link(options: MeasuredOptions) -> float | None:
    """Bytes per second to the host, if the options say."""
    rate = None if options.link is None else float(parse_bytes(options.link, "--link"))
    if rate == 0:
        raise ValueError(f"--link {options.link}: expected bytes per second, more than 0")
    return rate


def _check(options: StepOptions) -> None:
    """Check the options before a model is built."""
    if options.preset is not None and options.module is not None:
        raise ValueError("--preset and --module: pass only one of them")
    if options.module is not None and options.layers is not None:
        raise ValueError("--layers is for presets; with --module the function determines the layers")
    repeats = options.repeats if isinstance(options, MeasuredOptions) else None
    check_numbers(batch=options.batch, seq=options.seq, repeats=repeats)


def _from_preset(options: StepOptions, device: torch.device) -> tuple[nn.Module, Any]:
    config = preset(options.preset or "tiny", options.layers)
    dtype = _dtype("--dtype", options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    # Weights and gradients; the activations are still unknown.
    needed = 2 * dtype.itemsize * count_parameters(config)[0]
    there = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine_memory()
    if needed > there:
        raise ValueError(
            f"weights and gradients of {options.preset} take {format_bytes(needed)}, there are "
            f"{format_bytes(there)} on {device}; --layers cuts it"
        )
    model = Decoder(config, device=device, dtype=dtype)
    model.initialise(0)
    return model, _tokens(options, config.vocab, device, labels=True)


def _from_module(options: StepOptions, device: torch.device) -> tuple[nn.Module, Any]:
    """The model that `pkg:name` returns, with the batch that it returns or random tokens."""
    make = _function(options.module or "")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(f"--module {options.module}: {error}; expected a function without") from error
    made = make()
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"--module {options.module} returned {type(model).__name__}: "
            "expected an nn.Module, or one and its batch"
        )
    model.to(device=device, dtype=None if options.dtype is None else _dtype("--dtype", options.dtype))
    if batch is not None:
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
        return model, moved
    table = next((child for child in model.modules() if isinstance(child, nn.Embedding)), None)
    if table is None:
        raise ValueError(f"--module {options.module}: the model takes no tokens; return (model, batch)")
    return model, _tokens(options, table.num_embeddings, device, labels=False)


def _function(place: str) -> Any:
    name, colon, attribute = place.partition(":")
    if not (name and colon and attribute):
        raise ValueError(f"--module {place}: expected pkg:name, like mymodels.small:make_model")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as under `python -m`: finds files in the working folder
    try:
        found: Any = importlib.import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise ValueError(f"--module {place}: {error}") from error
    except AttributeError:
        raise ValueError(f"--module {place}: {name} has no {attribute!r}") from None
    if not callable(found):
        raise ValueError(f"--module {place}: {attribute} is a {type(found).__name__}, no function")
    return found


def _tokens(options: StepOptions, vocab: int, device: torch.device, *, labels: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (options.batch, options.tokens + 1), generator=generator).to(device)
    inputs = tokens[:, :-1].contiguous()
    return (inputs, tokens[:, 1:].contiguous()) if labels else inputs


def _dtype(option: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"{option} {name}: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]
