"""A region that is run again: for the tensors that its operations save, and for its outputs."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pagestash.saved.compiled import hidden
from pagestash.saved.generators import set_others_state
from pagestash.saved.region import Forward, Region, frames, set_frames
from pagestash.saved.storage import byte_range
from pagestash.saved.surroundings import set_random_state
from pagestash.saved.trees import tensors_of

if TYPE_CHECKING:
    from pagestash.saved.run import Run

Layout = tuple[int, int, int]
"""Where a tensor lies in its storage (first byte, end), and how large that is."""


class _Enough(BaseException):  # no `except Exception` of a forward may take it
    """All that is waited for has been made."""


class Rerun(Forward):
    """A forward that is run for the tensors it saves, and for its outputs."""

    replays = True

    def __init__(self, run: "Run", wanted: set[int], outputs: set[int]) -> None:
        self.found: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self._run = run
        self._wanted = wanted
        self._wanted_outputs = outputs
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._being_made: list[tuple[FrameType, int]] = []
        self._count = 0
        self._decided = 0
        # A sharded module inside must come to its end, where it puts its shards back.
        inside = (module for module in run.module.modules() if module is not run.module)
        self._may_stop = not outputs and not any(is_sharded(module) for module in inside)

    def go(self) -> None:
        run = self._run
        run._objects.check()
        run._surroundings.check()
        args, kwargs = run.again_from(run._inputs)
        self._gather_weights()
        before, output, ended = frames(), None, False
        set_frames((Region(run._saved, run.name, None, run=self),))
        hooks = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
        try:
            with run._surroundings.restored(), torch.enable_grad(), hooks:
                output = run.module.forward(*args, **kwargs)
                ended = True
        except _Enough:
            pass
        finally:
            set_frames(before)
            self._being_made.clear()
        run._surroundings.weights.check_after()
        if ended and self._count != len(run.saved):
            raise self._differs(
                f"{len(run.saved)} tensors were saved the first time, {self._count} this time"
            )
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} saved for backward in region {run.name!r} was "
                    "changed in place afterwards, which would be refused without a keeper, too; clone it before "
                    "changing it"
                )
        for number, tensor in self.found.items():
            mark = run.marks.pop(number, None)
            if mark is not None:
                what = f"tensor {number}, {_describe(*run.saved[number])}, had other values"
                run._home.checks.compare(mark, tensor, run.checked, self._differing(what))
        if self._wanted_outputs:
            self._take_outputs(tensors_of(output))

    def run_once(self, fn: Callable[[], Any]) -> Any:
        """What the first forward decided on."""
        decisions = self._run._decisions
        if self._decided == len(decisions):
            raise self._differs(
                f"once() was called {len(decisions)} times the first time, and more this time"
            )
        result, random, others = decisions[self._decided]
        self._decided += 1
        if random is not None:
            set_random_state(self._run._saved.device_here, random)
        if others is not None:
            set_others_state(others)
        return self._run.again_from(result)

    def note(self, tensor: torch.Tensor) -> None:
        """Count a tensor that an operation inside saved, and take it if it is waited for."""
        saved, number = self._run.saved, self._count
        self._count += 1
        if number >= len(saved) or saved[number] != (tensor.shape, tensor.dtype):
            first = "nothing more" if number >= len(saved) else _describe(*saved[number])
            raise self._differs(
                f"tensor {number} was {first} the first time, {_describe(tensor.shape, tensor.dtype)} this time"
            )
        if number in self._wanted:
            self.found[number] = tensor.detach()
            self._versions.append((tensor, tensor._version))
            if not tensor.requires_grad:
                # It may be one that the running operation has made and not filled yet, as the noise of rrelu. An
                # input that needs a gradient is complete.
                caller = sys._getframe(2)
                self._being_made.append((caller, caller.f_lasti))
        if self._may_stop and len(self.found) == len(self._wanted) and self._all_made():
            raise _Enough

    def _all_made(self) -> bool:
        """Whether the operations that the tensors were saved in are over: none of their calls is being run."""
        if self._being_made:
            running = set()
            frame: FrameType | None = sys._getframe(2)
            while frame is not None:
                running.add((frame, frame.f_lasti))
                frame = frame.f_back
            self._being_made = [call for call in self._being_made if call in running]
        return not self._being_made

    def _take_outputs(self, tensors: list[torch.Tensor]) -> None:
        for number in self._wanted_outputs:
            if number >= len(tensors) or layout(tensors[number]) != self._run.layouts[number]:
                raise self._differs(f"output {number} was laid out otherwise this time")
            self.outputs[number] = tensors[number].detach()

    def _gather_weights(self) -> None:
        """An output may be asked for before backward has come to its sharded module, which gathers them."""
        if self._run._surroundings.weights.sharded():
            unit: Any = next((module for module in reversed(self._run._path) if is_sharded(module)), None)
            if unit is not None:
                unit.unshard()  # and stays so: its backward is near, and reshards it

    def _differs(self, how: str) -> RuntimeError:
        return RuntimeError(self._differing(how))

    def _differing(self, how: str) -> str:
        return (
            f"region {self._run.name!r} is under recompute, and did something else when it was run again: {how}. "
            "Forward must do the same each time. It may read its arguments, weights, buffers, and attributes that "
            "are plain values; what it decides on goes into pagestash.once(...), or the region into another home"
        )


# Functions of the module, not methods: autograd never lets go of a pack hook that raised, as `_Enough` does.
@hidden
def _pack(tensor: torch.Tensor) -> None:
    rerun = frames()[-1].run
    assert rerun is not None
    rerun.note(tensor)


@hidden
def _unpack(packed: None) -> torch.Tensor:
    raise AssertionError("a region that is run again takes no gradients: its first forward would have raised")


def layout(tensor: torch.Tensor) -> Layout:
    return (*byte_range(tensor), tensor.untyped_storage().nbytes())


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{dtype} {tuple(shape)}"


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 gathers and shards the weights of `module`."""
    return hasattr(module, "unshard") and hasattr(module, "reshard")
