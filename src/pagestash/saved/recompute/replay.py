"""A replay: forward runs again for the tensors that its operations save, and for its outputs."""

from collections.abc import Callable
from typing import Any

import torch

from pagestash.saved.calls import set_calls, under_way
from pagestash.saved.compiled import hidden
from pagestash.saved.recompute.recipe import Recipe, form_of, layout_of
from pagestash.saved.recompute.trees import tensors_of
from pagestash.saved.recompute.undo import Undo, undo_all
from pagestash.saved.region import Forward, Region, frames, set_frames
from pagestash.torch_internals import next_sequence_number, pop_saved_tensors_hooks, push_saved_tensors_hooks


class _Enough(BaseException):  # no `except Exception` of a forward may catch it
    """All wanted tensors were found: the rest of forward need not run."""


class Replay(Forward):
    """Counts what operations save, as the first forward did, and takes what is wanted by its number."""

    replays = True

    def __init__(self, recipe: Recipe, wanted: set[int], wanted_outputs: set[int]) -> None:
        self.found: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self._recipe = recipe
        self._wanted = wanted
        self._wanted_outputs = wanted_outputs
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._filled_at = 0
        """The number of the node from which on all that was taken is filled."""
        self._count = 0
        self._once_calls = 0
        self._may_stop = False

    def run(self) -> None:
        """Run forward; `found` and `outputs` have what was wanted."""
        recipe = self._recipe
        recipe.check()
        # A sharded module inside must run to its end, where it reshards its weights.
        self._may_stop = not self._wanted_outputs and not any(
            map(is_sharded_class, map(type, recipe.modules[1:]))
        )
        args, kwargs = recipe.bring_back(recipe.inputs)
        self._gather_weights()
        before, calls, output, ended = frames(), under_way(), None, False
        set_frames((Region(recipe.hooks, recipe.name, None, run=self),))
        undo: Undo = []
        try:
            recipe.restore(undo)
            with torch.enable_grad():
                push_saved_tensors_hooks(_pack, _unpack)
                try:
                    output = recipe.module.forward(*args, **kwargs)
                finally:
                    pop_saved_tensors_hooks()
            ended = True
        except _Enough:
            pass
        finally:
            undo_all(undo)
            set_frames(before)
            # Those that `_Enough` left open are over: the thread of a GPU's backward outlives every step.
            set_calls(calls)
        recipe.weights.check_after(at_once=recipe.checked)
        if ended and self._count != len(recipe.saved):
            raise self._differs(
                f"{len(recipe.saved)} tensors were saved the first time, {self._count} this time"
            )
        self._check_found()
        if self._wanted_outputs:
            self._take_outputs(tensors_of(output))

    # --- while forward runs ---

    def run_once(self, fn: Callable[[], Any]) -> Any:
        """What `fn` returned in the first forward."""
        results = self._recipe.once_results
        if self._once_calls == len(results):
            raise self._differs(f"once() was called {len(results)} times the first time, and more this time")
        result = results[self._once_calls]
        self._once_calls += 1
        result.random.set()
        for set_again in result.attributes:
            set_again()
        return self._recipe.bring_back(result.value)

    def note(self, tensor: torch.Tensor) -> None:
        """Count a tensor that an operation inside saved, and take it if it is wanted."""
        saved, number, node = self._recipe.saved, self._count, next_sequence_number()
        self._count += 1
        if number >= len(saved) or saved[number] != form_of(tensor):
            first = "nothing more" if number >= len(saved) else _describe(*saved[number])
            raise self._differs(
                f"tensor {number} was {first} the first time, {_describe(*form_of(tensor))} this time"
            )
        if number in self._wanted:
            self.found[number] = tensor.detach()
            self._versions.append((tensor, tensor._version))
            if not tensor.requires_grad:
                # The operation that saves it has made its node, and may fill it later, as rrelu does its noise. (An
                # input that needs a gradient is there.)
                self._filled_at = node + 1
        if self._may_stop and len(self.found) == len(self._wanted) and node >= self._filled_at:
            raise _Enough

    def _gather_weights(self) -> None:
        """FSDP2 gathers a module's weights in its backward; an output may be wanted before that."""
        if self._recipe.weights.sharded():
            units = (module for module in reversed(self._recipe.path) if is_sharded_class(type(module)))
            unit: Any = next(units, None)
            if unit is not None:
                unit.unshard()  # and stays so: its backward is near, and reshards it

    # --- when it is over ---

    def _check_found(self) -> None:
        recipe = self._recipe
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} saved for backward in region {recipe.name!r} was "
                    "changed in place afterwards, which would be refused without a keeper, too; clone it before "
                    "changing it"
                )
        if not recipe.summaries:
            return
        for number, tensor in self.found.items():
            summary = recipe.summaries.pop(number, None)
            if summary is not None:
                what = f"tensor {number}, {_describe(*recipe.saved[number])}, had other values"
                recipe.compare(summary, tensor, self._difference(what))

    def _take_outputs(self, tensors: list[torch.Tensor]) -> None:
        for number in self._wanted_outputs:
            tensor = tensors[number] if number < len(tensors) else None
            if tensor is None or self._recipe.layouts[number] != layout_of(
                tensor, tensor.untyped_storage().nbytes()
            ):
                raise self._differs(f"output {number} had another layout this time")
            self.outputs[number] = tensor.detach()

    def _differs(self, how: str) -> RuntimeError:
        return RuntimeError(self._difference(how))

    def _difference(self, how: str) -> str:
        return (
            f"region {self._recipe.name!r} is under recompute, and its forward did something else when it was "
            f"replayed: {how}. Forward must do the same each time. It may read its arguments, weights, buffers, "
            "and attributes; put what it decides on into pagestash.once(...), or give the region another home"
        )


# Functions of the module, not methods: autograd never lets go of a pack hook that raised, as `_Enough` does.
@hidden
def _pack(tensor: torch.Tensor) -> str:
    region = frames()[-1]
    assert region.run is not None
    region.run.note(tensor)
    return region.name


@hidden
def _unpack(region: str) -> torch.Tensor:
    raise RuntimeError(
        f"region {region!r} is under recompute, and a backward went through a tensor of its replay, which has no "
        "graph to go through: a hook inside, or forward itself, kept it in the place of the first forward's. "
        "Compute the loss of what is kept before the first backward, or give the region another home"
    )


def _describe(shape: torch.Size | None, dtype: torch.dtype) -> str:
    return f"{dtype} nested" if shape is None else f"{dtype} {tuple(shape)}"


def is_sharded_class(kind: type) -> bool:
    """Whether FSDP2 gathers and shards the weights of modules of class `kind`, which it has given them."""
    return hasattr(kind, "unshard") and hasattr(kind, "reshard")
