"""`Keeper`: applies a policy to a model, step by step, and owns the pool."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self
from weakref import ref

import torch
from torch import nn

from pagestash.pages.host import MakeSlab, host_slab
from pagestash.pages.pool import PagePool
from pagestash.policy import HOMES, HomeName, Policy
from pagestash.saved.attached import Attached
from pagestash.saved.eight_bits import EightBits
from pagestash.saved.follow import StageEvents, follow
from pagestash.saved.home import Home, Keep, TakesGroups
from pagestash.saved.hooks import SavedTensorHooks
from pagestash.saved.module_hooks import RegionHooks
from pagestash.saved.offload.headroom import Reading, read_memory
from pagestash.saved.offload.moving import Offload
from pagestash.saved.overflow import Agreement, grow, refuse_if_overflowed
from pagestash.saved.quiet_rules import QuietRules, StepNeverOpened
from pagestash.saved.received_rows import RowsChoice
from pagestash.saved.recompute.home import Recompute
from pagestash.saved.scope import step_scope
from pagestash.saved.stash import Stash
from pagestash.saved.stats import KeeperStats, collect
from pagestash.saved.storage import storage_keys
from pagestash.saved.streams import capturing
from pagestash.sizes import format_bytes


class Keeper:
    """A keeper for a given policy. Users have `ps.Keeper`, which documents it and also takes a budget."""

    def __init__(
        self,
        policy: Policy,
        *,
        backend: str = "auto",
        check: bool | None = None,
        quiet: bool = False,
        make_slab: MakeSlab = host_slab,
    ) -> None:
        """`quiet`: say nothing of rules that move nothing. `make_slab` makes the host memory of `offload`."""
        self._backend = backend
        self._check = check
        self._is_quiet = quiet
        self._make_slab = make_slab
        self._hooks: list[Any] = []
        self._in_step = False
        self.rows: RowsChoice | None = None
        """Where layers have left `expected_rows` to this keeper, from the first step on (see `ps.Keeper`)."""
        self._ranks = Agreement()
        self._use(policy)

    def _use(self, policy: Policy, *, quiet: bool = False) -> None:
        """Put a policy into effect, where no model is attached: its homes hold nothing yet."""
        backend, check = self._backend, self._check
        self.policy = policy
        self._moves = any(rule.moves for rule in policy.rules)
        self._keep = Keep()
        self._recompute = Recompute(check=check is True)
        self._stash = stash = Stash(policy, self._keep, backend)
        # No home may refer to the keeper: in a cycle, a dropped keeper's pool would wait for the garbage collector.
        self._offload = Offload(
            policy, self._keep, stash, partial(_memory_of, ref(self)), backend, self._make_slab
        )
        moving: dict[HomeName, TakesGroups] = {"stash": self._stash, "offload": self._offload}
        # In the order in which they settle: offload before stash, because it gives back pages, too.
        self._homes: tuple[Home, ...] = (self._keep, self._recompute, self._offload, self._stash)
        coding = EightBits(moving, self._keep, stash, backend)
        self._saved = SavedTensorHooks(policy, moving, self._keep, self._recompute, coding)
        self._regions = RegionHooks(self._saved, self._recompute)
        self._attached = Attached(policy, self._saved, self._regions)
        self._quiet = None if quiet or self._is_quiet else QuietRules(policy, self._saved)
        self._regions.outside = StepNeverOpened()
        self._stage_events: StageEvents = {}

    # --- attach ---

    def attach(self, model: nn.Module, regions: Sequence[str] = (), *, others: Sequence[str] = ()) -> Self:
        """Watch the modules of `model` that a rule names. See `ps.Keeper.attach`."""
        self._attached.add(model, regions, others)
        self._follow_device()
        self._hand_out_pool()
        return self

    def detach(self) -> None:
        """Take all hooks off. What is stashed stays until backward has asked for it."""
        if self._in_step:
            raise RuntimeError("keeper.detach() in a step, whose regions are open; detach when it is over")
        self._attached.remove()
        # What graphs held that were freed since the last step.
        for home in self._homes:
            home.settle()
        self._saved.look = None  # which refers to the hooks
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _follow_device(self) -> None:
        """If the models were moved, measure anew on their device."""
        device, before = self._attached.device(), self._saved.device
        if device is None or device == before:
            return
        if before is not None:
            if self._stash.live or self._offload.live:
                raise RuntimeError(
                    f"the model was moved from {before} to {device}, and tensors of an earlier step still wait; "
                    "move it when backward is over and nothing holds its graph"
                )
            self._stash.measure()
            self._offload.measure()
        self._saved.device = device
        if self.policy.pool.device_bytes is not None and device.type != "meta":
            self.size_pool()

    def follow(self, schedule: Any) -> Any:
        """Read ahead in a pipeline schedule; `remove()` what this returns to stop. See `ps.Keeper.follow`."""
        following = follow(schedule, self._offload, self.aside, self._stage_events)
        self._hooks.append(following)
        return following

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Forwards inside do not belong to the step: no region is opened, and all that they save is kept."""
        before, self._regions.aside = self._regions.aside, True
        try:
            yield
        finally:
            self._regions.aside = before

    # --- step ---

    @contextmanager
    def step(self, *, check: bool = True) -> Iterator[None]:
        """One forward and backward, or several. See `ps.Keeper.step`."""
        if self._in_step:
            raise RuntimeError("keeper.step() is already open; a keeper runs one step at a time")
        self._regions.outside = None
        if not (self._moves or self._check):  # nothing to do, at no cost
            yield
            return
        self._follow_device()
        if self._saved.device is not None and self._saved.device.type == "meta":
            raise RuntimeError("the model is on the meta device: model.to_empty(device=...) before a step")
        self._saved.look = self._quiet
        self._note_weights()
        self._stash.keep_unpaged = check
        try:
            self._in_step = True
            with step_scope(self._saved, self._regions, self._homes, check_rows=self._check is not False):
                yield
        except BaseException as error:
            if check and isinstance(error, Exception):
                # The error may be a consequence of a refused group's zeros.
                refuse_if_overflowed(self.pool, self._ranks, self.policy.pool, error)
            # The step is lost in any case; its overflow must not be taken for the next one's.
            if check and self.pool is not None:
                self.pool.reset()
            raise
        finally:
            self._in_step = False
            if self._check is None and self._saved.marks.checked:
                self._check = False
        self._step_over(check)

    def _note_weights(self) -> None:
        """Before anything is saved: look up which storages are weights."""
        modules = list(self.modules())
        parameters = list(self._attached.parameters(modules))
        self._saved.weights = storage_keys([*parameters, *self._attached.buffers(modules)])
        if any(rule.bits is not None for rule in self.policy.rules):
            self._saved.weight_shapes = {tuple(parameter.shape) for parameter in parameters}

    def _step_over(self, check: bool) -> None:
        """After a step without an error: let the homes use what it has shown, and look for an overflow."""
        # Not in a capture: what it holds is fixed, and pinning memory is not allowed.
        if not capturing():
            for home in self._homes:
                home.commit()
        if check:
            self.size_pool()
            refuse_if_overflowed(self.pool, self._ranks, self.policy.pool)
        self._regions.refuse_compiled()
        if self._quiet is not None and not self._quiet.step_over(
            self._regions.openings, self._attached.own(), self._offload
        ):
            self._quiet = self._saved.look = None

    # --- the attached models ---

    @property
    def device(self) -> torch.device | None:
        """The device of the attached model; None before `attach`."""
        return self._attached.device() or self._saved.device

    def modules(self) -> Iterator[nn.Module]:
        """Modules of the attached models."""
        return self._attached.modules()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the attached models, each once."""
        return self._attached.parameters()

    def buffers(self) -> Iterator[torch.Tensor]:
        """Buffers of the attached models that are state; flags and counters of a step are not."""
        return self._attached.buffers()

    # --- the pool ---

    @property
    def pool(self) -> PagePool | None:
        """The pool; None before the measured step is over."""
        return self._stash.pool

    @property
    def overflow(self) -> torch.Tensor | None:
        """The pool's overflow flag, for an optimizer's `found_inf`; None before there is a pool."""
        return None if self.pool is None else self.pool.overflow

    @property
    def reservations(self) -> int:
        """Groups that were stashed so far. Does not wait for the device."""
        return self._stash.groups

    def size_pool(self) -> bool:
        """Make the pool and offload's plan from what was measured. Returns whether there is a pool.

        Does nothing while a backward of the measured step is still to come, or if nothing was measured.
        """
        outlook = self._offload.outlook()
        if self.pool is None:
            others = None if self._offload.undecided else 0 if outlook is None else outlook.pages
            pages = self._stash.pages_wanted(others)
            if pages is not None and (pages or self.policy.spill_bytes):
                pages = self._pages_for_rows(pages)
                self._make_pool(pages)
                if outlook is not None:  # what was measured had no pool
                    outlook.plan.tighten(pages * self.policy.pool.page_bytes)
        if outlook is not None and (self.pool is not None or not outlook.pages):
            self._offload.begin(outlook, self._saved.device_here)
        return self.pool is not None

    def _pages_for_rows(self, pages: int) -> int:
        """The pages of the pool, where some of what was measured will not go to pages (see `ps.Keeper`)."""
        return pages

    def _make_pool(self, device_pages: int) -> None:
        assert self._saved.device is not None
        self._stash.make_pool(self._saved.device, device_pages)
        self._hand_out_pool()

    def _hand_out_pool(self) -> None:
        """Give the pool, if there is one, to modules that write pages by themselves."""
        if self.pool is not None:
            for name, module in self._attached.own_stash.items():
                if hasattr(module, "use_pool"):  # its parts may be gone since
                    module.use_pool(self.pool, self._stash.account(name))

    def grow_pool(self) -> tuple[int, int]:
        """Grow the device tier to the pages wanted, times the headroom. Returns (pages wanted, pages had)."""
        assert self.pool is not None
        return grow(self.pool, self.policy.pool.headroom)

    # --- stats ---

    def reset_peaks(self) -> None:
        """Count peaks from now on; also clears the overflow flag."""
        for home in self._homes:
            home.reset_peaks()

    def held(self) -> dict[HomeName, int | torch.Tensor]:
        """Valid bytes in each home now. The pool's are a device integer, so that the host need not wait."""
        self._offload.sweep()
        waiting = {home.name: home.held() for home in self._homes}
        return {name: waiting[name] for name in HOMES}

    def stats(self) -> KeeperStats:
        """Bytes and peak by home and region, and the pool's tiers. Waits for the device."""
        self._offload.sweep()
        return collect(self._homes, self._stash, self._offload, self.device)

    def __repr__(self) -> str:
        size = (
            "unmeasured" if self.pool is None else format_bytes(self.pool.device_pages * self.pool.page_bytes)
        )
        return f"Keeper({len(self.policy.rules)} rules, pool {size})"


def _memory_of(keeper: "ref[Keeper]") -> Reading | None:
    """A reading of the memory of the keeper's device; None where there is nothing to read, or nobody."""
    found = keeper()
    return None if found is None else read_memory(found.device, found.parameters)
