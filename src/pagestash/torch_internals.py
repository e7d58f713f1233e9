"""Everything of torch that has no public name, in one place, under names that say what it is.

A torch release may rename any of it, and the package imports all the same. What is gone is refused by name where
it is used (`TorchInternalMissing`), or there is another way, and a warning where that does less. A release that is
newer than `CHECKED` and has all of it works. Most of these are torch's own functions under another name: a call
costs no more.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from operator import attrgetter
from types import FrameType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn
from torch.amp import GradScaler

log = logging.getLogger("pagestash")

CHECKED = ("2.11", "2.13", "2.15")
"""Versions of torch that tests were run on (docs/install.md: which)."""


class TorchInternalMissing(ImportError):
    """This torch lacks a private function or attribute that pagestash needs."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"torch {torch.__version__} has no {name}, which pagestash uses; "
            f"versions checked: {', '.join(CHECKED)}",
            name=name,
        )


def internal(owner: Any, path: str) -> Any:
    """`owner.path`; the path may have several parts."""
    try:
        return attrgetter(path)(owner)
    except AttributeError:
        names = (getattr(owner, name, None) for name in ("__qualname__", "__name__"))
        name = next(filter(None, names), type(owner).__name__)
        raise TorchInternalMissing(f"{name}.{path}") from None


def internal_if_called(owner: Any, path: str) -> Any:
    """The function `owner.path`; where it is missing, one that says so when it is called."""
    try:
        return internal(owner, path)
    except TorchInternalMissing as error:
        missing = error

        def refuse(*_: Any, **__: Any) -> Any:
            raise missing

        refuse.missing = missing  # type: ignore[attr-defined]
        return refuse


def internal_or(owner: Any, path: str, instead: Callable[..., Any], lost: str) -> Any:
    """The function `owner.path`; where it is missing `instead`, whose first call warns of what is lost."""
    try:
        return internal(owner, path)
    except TorchInternalMissing as error:
        message = f"{error}: {lost}"

        def call(*arguments: Any) -> Any:
            _warn(message)
            return instead(*arguments)

        call.missing = error  # type: ignore[attr-defined]
        return call


@cache
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _attribute(example: Any, name: str) -> Callable[[Any], Any]:
    """Reads an attribute that objects like `example` have. (Dynamo cannot trace an `attrgetter`.)"""
    found = internal_if_called(example, name)
    return found if hasattr(found, "missing") else lambda owner: getattr(owner, name)


def _class(owner: Any, name: str) -> Any:
    """A class to derive from; where it is missing, one that says so when an object of it is made."""
    found = internal_if_called(owner, name)
    refuses = hasattr(found, "missing")
    return type(name, (), {"__init__": found, "missing": found.missing}) if refuses else found


def _all_or_none(found: Any, *others: Any) -> Any:
    """The function, refused if one of the others is missing: what it begins needs them to end."""
    return next((each for each in (found, *others) if hasattr(each, "missing")), found)


def _first_missing(*found: Any) -> TorchInternalMissing | None:
    """What the first of these says that this torch lacks, if any does."""
    return next((each.missing for each in found if hasattr(each, "missing")), None)


def _import_or_empty(name: str) -> Any:
    """A module of torch; an empty one where it is missing."""
    try:
        return import_module(name)
    except ImportError:
        return SimpleNamespace(__name__=name)


if ".".join(torch.__version__.split(".")[:2]) not in CHECKED:
    log.debug("torch %s: the versions that pagestash was checked on are %s", torch.__version__, CHECKED)

_pytree = _import_or_empty("torch.utils._pytree")
tree_flatten = internal_if_called(_pytree, "tree_flatten")
tree_leaves = internal_if_called(_pytree, "tree_leaves")
tree_map = internal_if_called(_pytree, "tree_map")
tree_map_only = internal_if_called(_pytree, "tree_map_only")
tree_unflatten = internal_if_called(_pytree, "tree_unflatten")

# --- storages and tensors ---

key_of_storage: Callable[[torch.UntypedStorage], int] = _attribute(torch.UntypedStorage(0), "_cdata")
"""A storage, as a number that no other storage has while this one lives."""
storage_key: Callable[[torch.Tensor], int] = getattr(torch._C, "_storage_address", None) or (
    lambda tensor: key_of_storage(tensor.untyped_storage())
)
"""The same number, of a plain tensor's storage."""
storage_references: Callable[[int], int] = internal_if_called(torch._C, "_storage_Use_Count")
"""Number of references to a storage (by its key), in torch and in Python."""
_free_weak_ref: Callable[[int], None] = internal_if_called(torch.UntypedStorage, "_free_weak_ref")
_expired: Callable[[int], bool] = internal_if_called(torch.UntypedStorage, "_expired")
_weak_ref: Callable[[torch.UntypedStorage], int] = _all_or_none(
    internal_if_called(torch.UntypedStorage, "_weak_ref"), _free_weak_ref, _expired
)


class StorageWeakRef:
    """A weak reference to a storage, made in half the time of torch's: there is one for every saved tensor."""

    __slots__ = ("_free", "key")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._free = _free_weak_ref  # here, for the interpreter's end, when modules are gone
        self.key = _weak_ref(storage)  # that of `key_of_storage`

    def expired(self) -> bool:
        return _expired(self.key)

    def __del__(self) -> None:
        self._free(self.key)


if hasattr(_weak_ref, "missing"):
    StorageWeakRef = _weak_ref  # type: ignore[assignment,misc]  # refuses

LOCAL_PART = "_local_tensor"
"""The attribute of a distributed tensor that is the part of it on this rank. (A name, because
`getattr(tensor, LOCAL_PART, tensor)` costs less than a call.)"""

foreach_div_: Callable[..., None] = internal_if_called(torch, "_foreach_div_")
foreach_mul_: Callable[..., None] = internal_if_called(torch, "_foreach_mul_")
foreach_norm: Callable[..., tuple[torch.Tensor, ...]] = internal_if_called(torch, "_foreach_norm")
spin: Callable[[int], None] = internal_if_called(torch.cuda, "_sleep")
"""Keep the device busy for a number of clock cycles."""


foreach_copy_: Callable[..., None] = internal_if_called(torch, "_foreach_copy_")
"""`copy_` of each tensor of a list into that of another: one call, and the same copies."""

# --- streams and events. (torch's Python layer asks for devices and defaults anew in every call.) ---

current_stream_ids: Callable[[int], tuple[int, int, int]] = internal_if_called(
    torch._C, "_cuda_getCurrentStream"
)
"""The current stream of a device: its id, and its device's index and type."""
current_raw_stream: Callable[[int], int] = internal_if_called(torch._C, "_cuda_getCurrentRawStream")
"""The same stream, as CUDA's own functions take it."""
set_stream_ids: Callable[[int, int, int], None] = internal_if_called(torch._C, "_cuda_setStream")
"""Make the stream of these ids the current one, and its device the current one."""
current_device_index: Callable[[], int] = internal_if_called(torch._C, "_cuda_getDevice")
stream_captures: Callable[[], bool] = internal_if_called(torch._C, "_cuda_isCurrentStreamCapturing")
"""Whether the current stream is captured for a CUDA graph. CUDA must be initialised."""
_event = torch.cuda.Event.__base__
event_record: Callable[[torch.cuda.Event, torch.cuda.Stream], None] = internal_if_called(_event, "record")
event_wait: Callable[[torch.cuda.Event, torch.cuda.Stream], None] = internal_if_called(_event, "wait")
"""The stream waits for the event."""
event_query: Callable[[torch.cuda.Event], bool] = internal_if_called(_event, "query")


is_zero_tensor: Callable[[torch.Tensor], bool] = internal_or(
    torch.Tensor,
    "_is_zerotensor",
    lambda _: False,
    "forward-mode AD under a rule that moves tensors may fail",
)
"""Whether a tensor is all zeros, without memory: forward-mode AD makes such ones."""


any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", None) or (lambda: True)
"""Whether autocast may be on for any kind of device. (To ask for one kind takes twice as long.)"""


# --- autograd ---

current_node: Callable[[], Any] = internal_if_called(torch._C, "_current_autograd_node")
"""The node whose backward is running in this thread, or None."""
backward_number: Callable[[], int] = internal_if_called(torch._C, "_current_graph_task_id")
"""The id of the running backward pass; -1 outside of one."""
keeps_graph: Callable[[], bool] = internal_or(
    torch._C,
    "_autograd._get_current_graph_task_keep_graph",
    lambda: True,
    "backward of experts takes memory of its own for each result",
)
"""Inside backward: whether the graph is retained (`retain_graph`)."""
next_sequence_number: Callable[[], int] = internal_if_called(torch._C, "_autograd._get_sequence_nr")
"""The sequence number of the next autograd node in this thread."""
top_saved_tensors_hooks: Callable[[bool], Any] = internal_if_called(
    torch._C, "_autograd._top_saved_tensors_default_hooks"
)
"""The innermost pair of saved-tensor hooks, or None; True asks for it also while tracing."""
pop_saved_tensors_hooks: Callable[[], None] = internal_if_called(
    torch._C, "_autograd._pop_saved_tensors_default_hooks"
)
push_saved_tensors_hooks: Callable[[Callable[..., Any], Callable[..., Any]], None] = _all_or_none(
    internal_if_called(torch._C, "_autograd._push_saved_tensors_default_hooks"), pop_saved_tensors_hooks
)
"""These two are `saved_tensors_hooks`, whose end may come before that of the block it was opened in."""


def sequence_number(node: Any) -> int:
    """The sequence number of a node."""
    return internal(node, "_sequence_nr")()


preserve_versions: Callable[[tuple[torch.Tensor, ...]], AbstractContextManager[None]] = internal_if_called(
    torch.autograd.grad_mode, "_unsafe_preserve_version_counter"
)
"""A context in which writing to these tensors does not raise their version."""
current_transform: Callable[[], Any] = internal_or(
    torch._C,
    "_functorch.peek_interpreter_stack",
    lambda: None,
    "torch.func transforms in a keeper's step may fail",
)
"""The running `torch.func` transform (vmap, jvp), or None; its tensors have no storage of their own."""
is_transformed: Callable[[torch.Tensor], bool] = internal_or(
    torch._C,
    "_functorch.is_functorch_wrapped_tensor",
    lambda _: False,
    "torch.func transforms in a keeper's step may fail",
)

# --- dispatch modes ---

_python_dispatch = _import_or_empty("torch.utils._python_dispatch")
TorchDispatchMode: Any = _class(_python_dispatch, "TorchDispatchMode")
dispatch_modes: Callable[[], Sequence[Any]] = internal_if_called(
    _python_dispatch, "_get_current_dispatch_mode_stack"
)
"""The open dispatch modes, innermost last."""
push_dispatch_mode: Callable[[Any], None] = internal_if_called(_python_dispatch, "_push_mode")
pop_dispatch_mode: Callable[[], Any] = internal_if_called(_python_dispatch, "_pop_mode")
dispatch_depth: Callable[[], int] = internal_or(
    torch._C, "_len_torch_dispatch_stack", lambda: 0, "ps.rows marks nothing"
)
"""Number of open dispatch modes."""
MISSING_FOR_ROWS = _first_missing(
    TorchDispatchMode,
    dispatch_depth,
    dispatch_modes,
    push_dispatch_mode,
    pop_dispatch_mode,
    next_sequence_number,
)
"""What `ps.rows` cannot do without, if it is missing."""


def operators(*names: str) -> list[Any]:
    """Of aten's operators with these names those that this torch has. Rows are whole after one that is missing."""
    return [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]


# --- modules ---

_empty_module = nn.Module()
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = _attribute(
    _empty_module, "_parameters"
)
"""A module's own parameters by name. (`named_parameters` takes three times as long.)"""
buffers_of: Callable[[nn.Module], dict[str, torch.Tensor | None]] = _attribute(_empty_module, "_buffers")
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = _attribute(_empty_module, "_modules")
transient_buffers_of: Callable[[nn.Module], set[str]] = _attribute(
    _empty_module, "_non_persistent_buffers_set"
)
forward_hooks_of: Callable[[nn.Module], Any] = _attribute(_empty_module, "_forward_hooks")
forward_pre_hooks_of: Callable[[nn.Module], Any] = _attribute(_empty_module, "_forward_pre_hooks")
accumulate_hooks_of: Callable[[nn.Parameter], Any] = _attribute(
    nn.Parameter(torch.empty(0)), "_post_accumulate_grad_hooks"
)
"""Hooks that run when a parameter's gradient is ready; None if it never had any."""


def modules_in(*roots: nn.Module) -> list[nn.Module]:
    """`roots`, then all modules in them, each once.

    A region walks them every time it opens: a module's contents may change at any time, and its parameters do so
    in mid-step under FSDP2, so the result cannot be cached. torch's own walk spends most of its time on names: for
    a decoder's layer it takes 61 µs, storages included, and this one 20.
    """
    found = dict.fromkeys(roots)
    modules = list(found)
    for module in modules:  # the list grows in the loop
        for child in module._modules.values():
            if child is not None and child not in found:
                found[child] = None
                modules.append(child)
    return modules


COMPILED = "_orig_mod"
"""The name that `torch.compile(module)` gives the inner module."""
FSDP1_WRAPPED = "_fsdp_wrapped_module"
WRAPPERS = frozenset({COMPILED, FSDP1_WRAPPED, "_checkpoint_wrapped_module"})
"""The names that `torch.compile`, FSDP and activation checkpointing give the module they wrap."""


def compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


# --- torch.compile. Nothing here loads dynamo, which takes two seconds. ---


def dynamo_is_loaded() -> bool:
    """Whether anything can be compiled already."""
    return "torch._dynamo" in sys.modules


_COMPILED = "torch.compile of a model with a keeper may fail"
_frames = "_dynamo.eval_frame."
compiling_around: Callable[[], Any] = internal_or(
    torch._C, _frames + "get_eval_frame_callback", lambda: None, _COMPILED
)
"""The callback that compiles functions called from here, or None; None as well where `never_compile` holds."""
compiled_graphs: Callable[[Any], Sequence[Any]] = internal_or(
    torch._C, _frames + "_debug_get_cache_entry_list", lambda _: (), _COMPILED
)
"""The graphs that dynamo has compiled from a code object."""
forget_compiled: Callable[[Any], None] = internal_or(
    torch._C, _frames + "reset_code", lambda _: None, _COMPILED
)


def never_compile(code: Any, *, inside: bool) -> None:
    """Tell dynamo to run a code object as it is, and with `inside` also all that it calls."""
    try:
        skip, default, strategy, apply = (
            internal(torch._C, _frames + name)
            for name in (
                "_FrameAction.SKIP",
                "_FrameAction.DEFAULT",
                "_FrameExecStrategy",
                "set_code_exec_strategy",
            )
        )
    except TorchInternalMissing as error:
        _warn(f"{error}: {_COMPILED}")
    else:
        apply(code, strategy(skip, skip if inside else default))


def break_graph_at(function: Any, why: str) -> None:
    """Where dynamo meets `function`, its graph ends. (As `torch.compiler.disable` does.)"""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = why


def constant_when_compiled(function: Any) -> None:
    """Where dynamo meets `function`, it calls it once and takes the result for a constant.

    All that `torch.compiler.assume_constant_result` does.
    """
    function._dynamo_marked_constant = True


# --- optimizers and gradient scalers ---


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer can skip an update by a flag on the device."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


ScalerState = tuple[torch.Tensor | None, torch.Tensor | None, Any]
_SCALER = ("_scale", "_growth_tracker", "_per_optimizer_states")


def calling_scaler() -> GradScaler | None:
    """The gradient scaler whose `step` calls an optimizer that this is called from."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def scaler_state(scaler: GradScaler) -> ScalerState:
    """The scale, the growth tracker, and the state of each optimizer in this step."""
    scale, tracker, optimizers = (internal(scaler, name) for name in _SCALER)
    return scale, tracker, optimizers


def set_scaler_state(scaler: GradScaler, state: ScalerState) -> None:
    for name, value in zip(_SCALER, state):
        setattr(scaler, name, value)


# --- process groups ---


def drop_groups(mesh: Any) -> None:
    """Let a device mesh forget its process groups; in older torch it knows them by name alone."""
    getattr(mesh, "_pg_registry", {}).clear()


# --- torch.distributed.pipelining: loaded on first use, which takes a second ---


def pipeline_schedules() -> Any:
    """The module of torch's schedules."""
    return import_module("torch.distributed.pipelining.schedules")


def stages_of(schedule: Any) -> Sequence[Any]:
    """The stages of this rank, for a schedule of one or of several stages per rank."""
    return getattr(schedule, "_stages", None) or [internal(schedule, "_stage")]


def microbatches_of(schedule: Any) -> int:
    """Number of microbatches per step of the schedule."""
    return internal(schedule, "_n_microbatches")


def has_backward(schedule: Any) -> bool:
    """Whether the schedule has a loss, and so runs backward."""
    return internal(schedule, "_has_backward")


def replaced_actions(schedule: Any) -> list[str]:
    """The kinds of action that `register_custom_function` has replaced."""
    return sorted(str(kind) for kind in getattr(schedule, "_comp_type_to_function_map", {}))


def runs_as(schedule: Any) -> Literal["1F1B", "GPipe", "list", "unknown"]:
    """How a schedule runs its microbatches: by the code of 1F1B or GPipe, from a list, or unknown."""
    runs = getattr(type(schedule), "_step_microbatches", None)
    known = pipeline_schedules()
    if runs is internal(known, "Schedule1F1B._step_microbatches"):
        return "1F1B"
    if runs is internal(known, "ScheduleGPipe._step_microbatches"):
        return "GPipe"
    if runs is internal(known, "_PipelineScheduleRuntime._step_microbatches") and hasattr(
        schedule, "pipeline_order_with_comms"
    ):
        return "list"
    return "unknown"


def make_schedule(name: str, stages: Sequence[Any], microbatches: int, **options: Any) -> Any:
    """torch's schedule of this name; without one, a schedule that runs an order that it is given."""
    kind = internal(pipeline_schedules(), f"Schedule{name}" if name else "_PipelineScheduleRuntime")
    return kind(list(stages), microbatches, **options)


def run_in_order(schedule: Any, order: Sequence[Sequence[Any]]) -> None:
    """Have a schedule run the actions of each rank in this order: one alone, or a forward and a backward."""
    known = pipeline_schedules()
    make, kinds, overlapped = (
        internal(known, name) for name in ("_Action", "_ComputationType", "OVERLAP_F_B")
    )

    def action(given: Sequence[Any]) -> Any:
        made = tuple(make(each.stage, kinds(each.kind), each.microbatch) for each in given)
        return made[0] if len(made) == 1 else make(-1, overlapped, None, made)

    schedule.pipeline_order = {rank: list(map(action, actions)) for rank, actions in enumerate(order)}
    internal(schedule, "_prepare_schedule_with_comms")(schedule.pipeline_order)


def pairs_of(schedule: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The (stage, microbatch) of the forward and of the backward of each pair on this rank."""
    for action in schedule.pipeline_order_with_comms[schedule.rank]:
        if action.sub_actions is not None:
            forward, backward = ((each.stage_index, each.microbatch_index) for each in action.sub_actions)
            yield forward, backward


def ready_for_backward(schedule: Any, stage: Any, microbatch: int) -> tuple[Any, bool]:
    """Wait for what a stage's backward needs, as torch's runtime does; its loss, and whether it is the last one.

    The runtime will do the same again, when there is nothing more to wait for.
    """
    index = stage.stage_index
    internal(schedule, "_assert_unsharded")(stage)
    received = schedule.bwd_recv_ops.get((index, microbatch), [])
    while received:  # to the end: gloo's would wait for another message, if they were waited for again
        received.pop().wait()
    last = schedule.backward_counter[index] + 1 == microbatches_of(schedule)
    return internal(schedule, "_maybe_get_loss")(stage, microbatch), last


def frees_messages() -> bool:
    """Whether stages let go of messages in the course of a step, and not at its end as in older torch."""
    return hasattr(import_module("torch.distributed.pipelining").PipelineStage, "release_fwd_send_outputs")


def without_communication(schedule: type) -> Callable[..., Any]:
    """The schedule class without sends and receives, which take long to place and do not change the order."""
    internal(schedule, "_prepare_schedule_with_comms")

    class Unprepared(schedule):
        def _prepare_schedule_with_comms(self, actions: Any, format: Any = "compute_only") -> None:
            pass

    Unprepared.__name__ = schedule.__name__
    return Unprepared
