"""`pagestash profile`."""

import importlib
import importlib.util
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from pagestash.device import device_memory, find_device, out_of_memory
from pagestash.models.config import preset
from pagestash.models.decoder import Decoder, count_parameters
from pagestash.policy import Policy, Rule, format_bytes, machine_memory, parse_bytes
from pagestash.profiling.measure import profile
from pagestash.profiling.result import Profile
from pagestash.torch_internals import tree_map_only

WRONG_INPUT = 2
PIPE_COLUMNS = 160
WIDE_COLUMNS = 140
"""Width of the full table."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of the command line."""

    preset: str | None = None
    module: str | None = None
    layers: int | None = None
    batch: int = 2
    seq: int = 256
    device: str = "auto"
    dtype: str | None = None
    autocast: str | None = None
    policy: Path | None = None
    link: str | None = None
    repeats: int = 3
    depth: int | None = None
    tensors: str | None = None
    json: Path | None = None
    plot: Path | None = None


def run(asked: Asked) -> int:
    """Profile and print; returns the exit code. Bad input is one line on stderr."""
    # A pipe has no width, and rich would assume 80 columns.
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
    try:
        found = measure(asked)
        console.print(found.table(depth=asked.depth, narrow=console.width < WIDE_COLUMNS))
        if asked.tensors is not None:
            console.print(found.tensor_table(asked.tensors))
        if asked.json is not None:
            found.save(asked.json)
        if asked.plot is not None:
            found.plot(asked.plot)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG_INPUT
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        print("error: too little memory for this step; try --layers, --batch or --seq", file=sys.stderr)
        return WRONG_INPUT
    return 0


def measure(asked: Asked) -> Profile:
    """Profile what the options name."""
    _check(asked)
    device = find_device(asked.device, f"--device {asked.device}")
    policy = None if asked.policy is None else Policy.load(asked.policy)
    link = None if asked.link is None else float(parse_bytes(asked.link, "--link"))
    if link == 0:
        raise ValueError(f"--link {asked.link}: expected bytes per second, more than 0")
    text = 8 * asked.batch * (asked.seq + 1)
    if text > device_memory(device):
        raise ValueError(
            f"--batch {asked.batch} --seq {asked.seq}: the tokens alone take {format_bytes(text)}, {device} has "
            f"{format_bytes(device_memory(device))}"
        )
    autocast = None if asked.autocast is None else _dtype("--autocast", asked.autocast)
    model, batch = _from_module(asked, device) if asked.module else _from_preset(asked, device)
    with ExitStack() as stack:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        # On stderr: stdout has the table.
        errors = Console(stderr=True)
        progress = stack.enter_context(
            Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
        )
        task = progress.add_task("", total=None)

        def tell(what: str, number: int, steps: int) -> None:
            progress.update(task, description=what, completed=number, total=steps)

        return profile(
            model,
            batch,
            policy=policy,
            link=link,
            autocast=autocast,
            repeats=asked.repeats,
            progress=tell,
        )


def _check(asked: Asked) -> None:
    """Check the options before a model is built."""
    if asked.preset is not None and asked.module is not None:
        raise ValueError("--preset and --module: pass only one of them")
    if asked.module is not None and asked.layers is not None:
        raise ValueError("--layers is for presets; with --module the function determines the layers")
    for name in ("batch", "seq", "repeats", "depth"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: expected at least 1")
    for name in ("json", "plot"):
        path = getattr(asked, name)
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"--{name} {path}: expected a file in a folder that exists")
    if asked.tensors is not None:
        Rule(asked.tensors, "keep")
    if asked.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'pagestash[plot]'")


def _from_preset(asked: Asked, device: torch.device) -> tuple[nn.Module, Any]:
    config = preset(asked.preset or "tiny", asked.layers)
    dtype = _dtype("--dtype", asked.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    # Weights and gradients; the activations are still unknown.
    needed = 2 * dtype.itemsize * count_parameters(config)[0]
    there = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine_memory()
    if needed > there:
        raise ValueError(
            f"weights and gradients of {asked.preset} take {format_bytes(needed)}, there are "
            f"{format_bytes(there)} on {device}; --layers cuts it"
        )
    model = Decoder(config, device=device, dtype=dtype)
    model.initialise(0)
    return model, _tokens(asked, config.vocab, device, labels=True)


def _from_module(asked: Asked, device: torch.device) -> tuple[nn.Module, Any]:
    """The model that `pkg:name` returns, with the batch that it returns or random tokens."""
    made = _function(asked.module or "")()
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"--module {asked.module} returned {type(model).__name__}: expected an nn.Module, or one and its batch"
        )
    model.to(device=device, dtype=None if asked.dtype is None else _dtype("--dtype", asked.dtype))
    if batch is not None:
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
        return model, moved
    table = next((child for child in model.modules() if isinstance(child, nn.Embedding)), None)
    if table is None:
        raise ValueError(f"--module {asked.module}: the model takes no tokens; return (model, batch)")
    return model, _tokens(asked, table.num_embeddings, device, labels=False)


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


def _tokens(asked: Asked, vocab: int, device: torch.device, *, labels: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (asked.batch, asked.seq + 1), generator=generator).to(device)
    inputs = tokens[:, :-1].contiguous()
    return (inputs, tokens[:, 1:].contiguous()) if labels else inputs


def _dtype(option: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"{option} {name}: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]
