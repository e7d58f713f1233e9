"""Expert parallelism of transformers: our dispatch behind the name of its own, `"ep_dispatch_experts"`.

transformers looks its parallel styles up by name, and from 5.19 on the style of that name puts a forward on every
module of experts that sends tokens to the ranks of their experts. Ours lets it do so, and puts a forward of its own
in front: calls that need gradients, of modules with `experts_implementation="pagestash"`, go through the expert
block with an `AllToAll`; every other call goes to transformers' forward. The name is theirs because transformers
tests for it in several places. An `ep_implementation` (5.23) that sends no tokens stays as it is.

Up to 5.18 there is no such style: every rank has all tokens, and marks the choices of other ranks by an id that is
no expert's. That costs no row in our block, and nothing here is used.
"""

import importlib
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from pagestash.integrations.hf.experts import NAME, implementation, runs_now, runs_of
from pagestash.integrations.hf.report import Report
from pagestash.kernels.moe.rows import ALIGNMENT, padded_rows
from pagestash.moe.experts import Experts
from pagestash.moe.parallel.alltoall import AllToAll
from pagestash.saved.names import plain_names
from pagestash.saved.received_rows import ReceivedRows
from pagestash.saved.streams import capturing
from pagestash.step.guard import StepOverflowed

STYLE = "ep_dispatch_experts"
SKEW = 2
"""The default room between two ranks, as a multiple of an even load."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many tokens and rows the static buffers of a padded dispatch hold; see `expert_parallel`."""

    max_tokens: int
    pair_capacity: int | None
    expected_rows: int | Literal["auto"]


class DispatchStyle:
    """transformers' style, with our forward in front of the one that it installs."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)

    def install_forward(
        self, module: nn.Module, ep_mesh: Any, *, tp_mesh: Any = None, **more: Any
    ) -> nn.Module:
        """What transformers calls for every module of experts."""
        experts_forward = module.forward
        self.theirs.install_forward(module, ep_mesh=ep_mesh, tp_mesh=tp_mesh, **more)
        if more.get("ep_implementation", "auto") in ("auto", "all_to_all"):
            module.forward = DispatchedForward(module, self.theirs, experts_forward, ep_mesh, tp_mesh)
        return module


class DispatchedForward:
    """The forward of a module of experts that are divided among ranks: ours, or transformers'."""

    wired = True
    """The rows of the module's experts come from other ranks."""

    def __init__(
        self, module: nn.Module, style: Any, experts_forward: Any, ep_mesh: Any, tp_mesh: Any
    ) -> None:
        self.room: Room | None = None
        """None: no static buffers; the host reads how many rows travel, once in each forward."""
        self._module, self._style, self._theirs = module, style, module.forward
        self._experts_forward, self._ep_mesh, self._tp_mesh = experts_forward, ep_mesh, tp_mesh

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        module, style, ep, tp = self._module, self._style, self._ep_mesh, self._tp_mesh
        runs = runs_now(module) if implementation(module) == NAME else None
        if runs is None:
            return self._theirs(hidden_states, top_k_index, top_k_weights)
        tokens = [_local(each) for each in (hidden_states, top_k_index, top_k_weights)]
        shape = tokens[0].shape
        # Ranks of one tensor-parallel group have the same tokens: each sends its part of them.
        shares = tp is not None and tp.size() > 1
        if shares:
            tokens = [_part(each, tp) for each in tokens]
        self._make_ready(runs, choices=top_k_index.shape[1])
        with style.context_around_forward(module, ep):
            output = self._experts_forward(*tokens)
        return _whole(output, tp, shape) if shares else output

    def __deepcopy__(self, memo: dict[int, Any]) -> "DispatchedForward":
        """As functions are copied, which transformers' forward is: process groups cannot be."""
        return self

    def _make_ready(self, runs: Experts, choices: int) -> None:
        room = self.room
        if room is None and capturing():
            raise RuntimeError(
                "a CUDA graph cannot hold an exchange of tokens whose sizes the host reads; call "
                "pagestash.hf.expert_parallel(model, max_tokens=...) before the first step"
            )
        if runs.dispatch is None:
            runs.dispatch = self._dispatch(runs, choices)
        if room is not None:
            # The flag is the module's own, which moves with the model.
            runs.over_capacity = self._module.over_capacity  # type: ignore[assignment]

    def _dispatch(self, runs: Experts, choices: int) -> AllToAll:
        ranks, group, room = self._ep_mesh.size(), self._ep_mesh.get_group(), self.room
        config = replace(runs.config, experts=ranks * runs.config.experts, top_k=choices)
        if room is None:
            return AllToAll(config, group, padded=False)
        sharing = 1 if self._tp_mesh is None else self._tp_mesh.size()
        tokens = math.ceil(room.max_tokens / sharing)
        most = tokens * min(choices, runs.config.experts)
        even = math.ceil(tokens * choices / ranks)
        pair = room.pair_capacity or min(padded_rows(SKEW * even, ALIGNMENT), most)
        config = replace(config, expected_rows=room.expected_rows)
        return AllToAll(config, group, max_tokens=tokens, pair_capacity=pair)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _part(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    """This rank's rows of a tensor that all ranks of the mesh have. Backward gathers their gradients."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # takes seconds to load

    same = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return same.redistribute(mesh, [Shard(0)]).to_local()


def _whole(part: torch.Tensor, mesh: Any, shape: torch.Size) -> torch.Tensor:
    """The rows of all ranks of the mesh, of which each has its part."""
    from torch.distributed.tensor import DTensor, Shard

    rows = DTensor.from_local(part.contiguous(), mesh, [Shard(0)], shape=shape, stride=(shape[1], 1))
    return rows.full_tensor()


def register() -> None:
    """Put our style in the place of transformers', in this process. (Up to 5.18 there is none to stand before.)"""
    styles = _styles()
    theirs = styles.get(STYLE)
    if theirs is not None and not isinstance(theirs, DispatchStyle):
        styles.register(STYLE, DispatchStyle(theirs))


def _styles() -> Any:
    """transformers' registry of parallel styles, with those of expert parallelism in it; {} where there is none."""
    for name in ("expert_parallel", "tensor_parallel"):  # 5.22; before
        try:
            return importlib.import_module(f"transformers.distributed.{name}").ALL_PARALLEL_STYLES
        except (ImportError, AttributeError):
            continue
    return {}


# --- static shapes ---


class OverCapacity(StepOverflowed):
    """More rows were to go from one rank to another than there was room for: the step's results are not valid."""


def expert_parallel(
    model: nn.Module,
    *,
    max_tokens: int,
    pair_capacity: int | None = None,
    expected_rows: int | Literal["auto"] = 0,
) -> Report:
    """Give the expert-parallel layers of `model` buffers of static shape, so that no layer waits for the host.

        model = AutoModelForCausalLM.from_pretrained(
            name, experts_implementation="pagestash", distributed_config=DistributedConfig(fsdp_size=8, ep_size=8)
        )
        pagestash.hf.expert_parallel(model, max_tokens=8192)      # on every rank, with the same numbers

    `max_tokens` is the most tokens of a batch on any rank. `pair_capacity` is how many rows travel between every
    two ranks in a layer, whatever was chosen; None: twice an even load. `expected_rows`: see `MoEConfig`; with
    "auto" a keeper that is attached afterwards chooses the number, as it does for `pagestash.moe`.

    If a rank has more rows for another than that, `GraphedStep` grows the buffers of all ranks and runs the batch
    again. In any other loop the model's forward raises `OverCapacity` on all ranks, before backward; the buffers
    have grown then, and the batch can be run again. To find out, it waits for the device, once in each forward.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: expected at least 1")
    if pair_capacity is not None and pair_capacity < 1:
        raise ValueError(f"pair_capacity={pair_capacity}: expected at least 1 row")
    if expected_rows != "auto" and (isinstance(expected_rows, str) or expected_rows < 0):
        raise ValueError(f"expected_rows={expected_rows!r}: expected 0 or more, or 'auto'")
    layers = [(name, module) for name, module in plain_names(model) if _forward_of(module) is not None]
    if not layers:
        raise ValueError(
            "expert_parallel: no layer of the model sends tokens to other ranks by our dispatch; it needs "
            "transformers 5.19 or later and import pagestash.hf before from_pretrained(distributed_config=...)"
        )
    room = Room(max_tokens, pair_capacity, expected_rows)
    report, bounded = Report(), []
    for name, module in layers:
        runs = runs_of(module) if implementation(module) == NAME else None
        if runs is None:
            report.leave("dispatch", name, module, "transformers' own implementation runs its experts")
        elif "grow_capacity" in module.__dict__:
            report.leave("dispatch", name, module, "has buffers of static shape already")
        else:
            _bound(module, runs, room)
            bounded.append(module)
            report.on_undo(partial(_unbound, module))
            report.replace("dispatch", name, module, "a padded all-to-all")
    if bounded:
        report.on_undo(model.register_forward_hook(_RaiseIfOver(bounded)).remove)
    return report


def _forward_of(module: nn.Module) -> DispatchedForward | None:
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, DispatchedForward) else None


def _bound(module: Any, runs: Experts, room: Room) -> None:
    """Make `module` one whose capacity `GraphedStep` watches and grows."""
    module.forward.room, runs.dispatch = room, None
    if room.expected_rows == "auto":
        # A keeper asks the modules of the model for it.
        module.received_rows = runs.received_rows = ReceivedRows()
    module.register_buffer("over_capacity", runs.over_capacity, persistent=False)
    module.grow_capacity, module.clear_over_capacity = runs.grow_capacity, runs.clear_over_capacity


def _unbound(module: Any) -> None:
    runs = runs_of(module)
    assert runs is not None
    module.forward.room = runs.dispatch = runs.received_rows = None
    module.__dict__.pop("received_rows", None)
    del module.over_capacity, module.grow_capacity, module.clear_over_capacity


class _RaiseIfOver:
    """After a model's forward: raises on all ranks if a layer of any had no room.

    Not in a capture: whoever replays the graph reads the flags.
    """

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers

    def __call__(self, *_: Any) -> None:
        if capturing() or not torch.is_grad_enabled():
            return
        over = torch.stack([layer.over_capacity for layer in self._layers]).max()
        # Of all ranks, not of those alone that share the experts: data parallelism makes one update of all.
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        if not bool(over):
            return
        for layer in self._layers:
            layer.grow_capacity()
            layer.clear_over_capacity()
        raise OverCapacity(
            "a rank had more rows for another than the pair capacity of an expert-parallel layer: the results of "
            "this forward are not valid. Run the batch again; the buffers have grown to what was wanted."
        )
