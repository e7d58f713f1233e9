"""The first forward of a region under recompute: it is recorded, so that it can be replayed.

Every tensor that an operation in it saves is counted. A discarded tensor is known by its number in that count. A
`Replay` runs forward again, counts the same way, takes the tensors that are wanted, and stops when it has them.
Gradients flow through the graph of the first forward; of a replay, nothing but those tensors is used.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pagestash.policy import Rule
from pagestash.saved.hooks import SavedTensorHooks
from pagestash.saved.packed import Handle
from pagestash.saved.recompute.buffers import version_of
from pagestash.saved.recompute.home import Recompute
from pagestash.saved.recompute.objects import may_change
from pagestash.saved.recompute.once import once
from pagestash.saved.recompute.packed import Discarded, Output, OutputHandle
from pagestash.saved.recompute.recipe import OnceResult, Recipe, ReplayInput, form_of, layout_of
from pagestash.saved.recompute.recomputed import Recomputed
from pagestash.saved.recompute.references import References
from pagestash.saved.recompute.rng import Random
from pagestash.saved.recompute.trees import map_leaves, tensors_of
from pagestash.saved.recompute.value_checks import summary_of
from pagestash.saved.region import Recording, Region, frames, set_frames
from pagestash.saved.storage import byte_range, checksum, is_nested, plain_storage
from pagestash.torch_internals import StorageWeakRef, buffers_of, storage_key

_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
"""Layouts that have no bytes to count."""


@torch.no_grad()
def _write(owner: nn.Module, name: str, value: torch.Tensor) -> None:
    """Into the buffer that a replay has."""
    there = buffers_of(owner)[name]
    assert there is not None
    there.copy_(value)


class RecordedForward(Recording):
    """Writes the recipe of one forward while it runs. When it is over, `Recomputed` lives on alone."""

    def __init__(
        self,
        home: Recompute,
        hooks: SavedTensorHooks,
        outer: Region,
        path: Sequence[nn.Module],
        modules: Sequence[nn.Module],
        name: str,
        rule: Rule,
        arguments: tuple[tuple, dict[str, Any]],
    ) -> None:
        """Of the last module of `path`, called with `arguments`; inputs wait in the home of `outer`.

        `modules`: that module, and all in it.
        """
        self._recipe = Recipe(name, path, modules, hooks, home.checks, home.learned)
        home.note_recipe(self._recipe)
        self._recomputed = Recomputed(self._recipe, home)
        self._modules = modules
        self._saved = self._recipe.saved
        self._home = home
        self._hooks = hooks
        self._outer = outer
        self._least_bytes = rule.least_bytes
        self._held: dict[int, list[tuple[torch.Tensor, int]]] = {}
        """By storage: tensors that are held, and their versions."""
        self._discarded: dict[int, StorageWeakRef] = {}
        """Storages of discarded tensors. The weak reference keeps the key from being given to another storage."""
        self._discarded_bytes = 0
        self._to_summarize: list[tuple[int, torch.Tensor, int]] = []
        self._unchecked: set[int] = set()
        """Storages of which some bytes may be anything."""
        self._recipe.inputs = self._hold(arguments, outer, inputs=True)

    def parameters(self) -> set[int]:
        """The storages of the module's parameters."""
        return self._recipe.weights.storages

    # --- what operations save ---

    def note(self, tensor: torch.Tensor) -> None:
        """Count a tensor that an operation inside saved, whatever becomes of it."""
        self._saved.append(form_of(tensor))

    def home_of(self, tensor: torch.Tensor, key: int | None) -> Region | None:
        """The region whose home takes a tensor saved in this one: None if it is discarded.

        An input is held in any case; what is below `min_bytes` stays, and so does a sparse or nested tensor.
        (A jagged one has values with plain memory.)
        """
        if key is None and (tensor.layout in _SPARSE or is_nested(tensor)):
            return self._outer
        if tensor.nbytes < self._least_bytes:
            return self._outer
        held = None if key is None else self._held.get(key)
        if held is None:
            return None
        at = byte_range(tensor)
        return self._outer if any(byte_range(other) == at for other, _ in held) else None

    def discard(self, tensor: torch.Tensor, key: int | None, rows: torch.Tensor | None) -> Discarded:
        """Let go of the tensor that was counted last; where there are `rows`, others may be garbage."""
        if key is not None and key not in self._discarded and key not in self._held:
            storage = tensor.untyped_storage()
            self._discarded[key] = StorageWeakRef(storage)
            self._discarded_bytes += storage.nbytes()
        if self._recomputed.moves:
            self._hooks.check_stream(self._recipe.name)
        number = len(self._saved) - 1
        self._recomputed.want(number)
        if rows is None and key is not None and key not in self._unchecked and self._recipe.checked:
            self._to_summarize.append((number, tensor.detach(), tensor._version))
        return Discarded(self._recomputed, number)

    def leave_unchecked(self, tensor: torch.Tensor) -> None:
        self._unchecked.add(storage_key(tensor))

    # --- what is held for the replay ---

    def run_once(self, fn: Callable[[], Any]) -> Any:
        """Run `fn` as if it were called outside the region, and hold its result."""
        recipe, current = self._recipe, frames()
        start = next(index for index, frame in enumerate(current) if frame.run is self)
        inner = current[-1]
        region = inner
        if inner.run is not None:
            region = Region(self._hooks, recipe.name, self._outer.rule, weights=inner.weights)
        set_frames((*current[:start], region))
        try:
            # (A forward recorded around this one may have to hold the result, too.)
            before, random = References(self._modules), Random(recipe.device, self._home.learned.python_rng)
            buffers = [
                (owner, name, buffer, version_of(buffer))
                for owner in self._modules
                for name, buffer in buffers_of(owner).items()
                if buffer is not None
            ]
            result = once(fn)
            random.keep_drawn()
            held = self._hold(result, region, note=region is not inner)
            written = [
                partial(_write, owner, name, buffer.detach().clone())
                for owner, name, buffer, version in buffers
                if version_of(buffer) != version
            ]
            recipe.once_results.append(OnceResult(held, random.now(), [*before.changes(), *written]))
            return result
        finally:
            set_frames(current)
            if region is not inner:
                self._hooks.close(region)

    def _hold(self, tree: Any, region: Region, *, inputs: bool = False, note: bool = True) -> Any:
        """`tree` with its tensors packed in `region`'s home.

        `note`: where an operation saves one of them, there is nothing to discard.
        """
        known: dict[int, ReplayInput] = {}

        def hold(leaf: Any) -> Any:
            # (An inference tensor is never saved and has no version; outside inference mode nothing changes it.)
            if not isinstance(leaf, torch.Tensor) or leaf.is_inference():
                if inputs and may_change(leaf):
                    self._recipe.takes_object(leaf)
                return leaf
            # A tensor that is passed twice is one tensor in the replay, too: attention asks whether `query is key`.
            held = known.get(id(leaf))
            if held is None:
                held = known[id(leaf)] = self._hold_tensor(leaf, region, chained=inputs, note=note)
            return held

        return map_leaves(hold, tree)

    def _hold_tensor(self, tensor: torch.Tensor, region: Region, *, chained: bool, note: bool) -> ReplayInput:
        key, alone = plain_storage(tensor), tensor.detach()
        packed = self._hooks.pack_in(region, alone, chained=chained, for_replay=True)
        if note and key is not None:
            self._held.setdefault(key, []).append((alone, tensor._version))
        if isinstance(packed, OutputHandle):
            if self._hooks.look is not None:
                self._hooks.look.discarded_by(packed.recomputed_by)
            self._recomputed.replay_bytes += packed.recomputed.replay_bytes
            self._recomputed.moves |= packed.recomputed.moves
        elif isinstance(packed, Handle):
            self._recomputed.moves = True
        summary = None
        if self._recipe.checked and key is not None and self._hooks.rows_of(region, tensor) is None:
            # What is held must have every bit; what is recomputed may differ by rounding.
            summary = summary_of(tensor) if isinstance(packed, OutputHandle) else checksum(tensor)
        return ReplayInput(packed, tensor.requires_grad, summary)

    # --- the end ---

    def close(self, weights: set[int], output: Any) -> None:
        """The forward is over: from here on its outputs can be recomputed. `weights`: storages of the region's."""
        self._recipe.close()
        self._check_held()
        self._remember_outputs(weights, output)
        if self._to_summarize:
            self._summarize()
        # Regions of tensors that were claimed may outlive the forward, and must not hold its inputs.
        self._held, self._discarded = {}, {}

    def _check_held(self) -> None:
        for tensors in self._held.values():
            for tensor, version in tensors:
                if tensor._version != version:
                    raise RuntimeError(
                        f"region {self._recipe.name!r} is under recompute, and changes its input of shape "
                        f"{tuple(tensor.shape)} in place (or what it got from once()), so that its forward cannot "
                        "be replayed; clone it first, or give the region another home"
                    )

    def _remember_outputs(self, weights: set[int], output: Any) -> None:
        own: set[int] = set()
        replay_bytes = self._discarded_bytes
        for number, tensor in enumerate(tensors_of(output)):
            key = plain_storage(tensor)
            if key is None or key in weights or key in self._hooks.weights or key in self._held or key in own:
                continue  # it was there before
            if tensor.numel() == 1 or not tensor.is_floating_point():
                continue  # a scalar is not worth a forward, and a choice is never recomputed
            own.add(key)
            size = tensor.untyped_storage().nbytes()
            self._recipe.layouts[number] = layout_of(tensor, size)
            replay_bytes += size
            if self._saved:
                self._home.remember(key, tensor, Output(self._recomputed, number))
            # (Else the hooks of another, such as a checkpoint's, took all and hold it themselves.)
        self._recomputed.replay_bytes += replay_bytes

    def _summarize(self) -> None:
        """Only now: the operation that saved a tensor may not have filled it then."""
        for number, tensor, version in self._to_summarize:
            summary = summary_of(tensor) if tensor._version == version else None
            if summary is not None:
                self._recipe.summaries[number] = summary
                if tensor.is_cuda:
                    # It may be of another stream, which takes its memory as soon as it is free.
                    tensor.record_stream(torch.cuda.current_stream())
        self._to_summarize = []
