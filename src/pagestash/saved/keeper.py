"""`Keeper`: applies a policy to a model, step by step, and owns the pool."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pagestash.kernels.pages.layout import Counter
from pagestash.pages.pool import PagePool
from pagestash.pages.slabs import HostSlabs
from pagestash.pages.ticket import Ticket
from pagestash.policy import HomeName, Policy, format_bytes
from pagestash.saved.attached import Attached
from pagestash.saved.capture import Capture
from pagestash.saved.follow import follow
from pagestash.saved.homes import Home, Keep
from pagestash.saved.identity import storage_keys
from pagestash.saved.measured import MeasuredOffload, Outlook
from pagestash.saved.offload import Offload
from pagestash.saved.order import Event, Group, Key, Recorder
from pagestash.saved.overflow import Agreement, grow, make_room, refuse_if_overflowed
from pagestash.saved.pressure import Pressure, read_memory
from pagestash.saved.quiet_rules import QuietRules, StepNeverOpened
from pagestash.saved.recompute import Recompute
from pagestash.saved.region import Region, enter, frames, leave, set_frames
from pagestash.saved.stash import MeasuredStash, Stash
from pagestash.saved.stats import KeeperStats, collect
from pagestash.saved.streams import capturing
from pagestash.saved.watch import Watch


class Keeper:
    """Gives the saved tensors of a model's regions the homes that a policy names.

        keeper = Keeper(Policy(rules=[Rule("layers.*.moe.experts", "stash")])).attach(model)
        with keeper.step():
            loss = model(batch)
            loss.backward()

    A module that has `use_pool(pool, account)` and falls under a stash rule is given the pool, to write pages
    from its own kernels (`pagestash.moe` does). With `pool.device = "auto"` the first step that stashes anything
    measures, waiting for the device; the pool is made when it ends. A module that has `use_recompute(on)` and falls
    under a recompute rule recomputes by itself; of any other, forward is run again. Results are the same to the
    last bit with and without a keeper.

    `check` looks, in eager steps, whether a gradient reaches rows that were dropped because of `ps.rows`, and
    raises by name: None in the first step that has any, True in every step (it waits for the device), False never.
    """

    def __init__(self, policy: Policy, *, backend: str = "auto", check: bool | None = None) -> None:
        self.policy = policy
        self._backend = backend
        self._check = check
        self._keep = Keep()
        self._recorder = Recorder()
        self._recompute = Recompute()
        self._recompute.checks.overflow = lambda: self.overflow
        self._stash: Stash | MeasuredStash
        self._offload: Offload | MeasuredOffload
        self._homes: dict[HomeName, Home] = {"keep": self._keep, "recompute": self._recompute}
        self._measure()
        self._capture = Capture(policy, self._homes, None)
        self._hooks: list[Any] = []
        self._watch = Watch(self._capture, self._recompute)
        self._attached = Attached(policy, self._capture, self._watch)
        self._quiet: QuietRules | None = QuietRules(policy, self._capture)
        self._watch.outside = StepNeverOpened()
        self._in_step = False
        self._ranks = Agreement()
        self._habits: dict[Any, Any] = {}

    def _measure(self) -> None:
        """The next step is measured, as the first one is."""
        pressure = Pressure(lambda: read_memory(self.device, self.parameters))
        self._stash = self._homes["stash"] = MeasuredStash(self.policy.pool.page_bytes)
        self._offload = self._homes["offload"] = MeasuredOffload(self._recorder, pressure)

    # --- attach ---

    def attach(self, model: nn.Module, regions: Sequence[str] = ()) -> "Keeper":
        """Watch the modules of `model` that a rule names; `regions` are the names that `ps.region` will open."""
        self._attached.add(model, regions)
        self._follow_device()
        if isinstance(self._stash, Stash):
            self._hand_out(self._stash)
        return self

    def detach(self) -> None:
        """Take all hooks off again; what is stashed stays until backward has asked for it."""
        if self._in_step:
            raise RuntimeError("keeper.detach() in a step, whose regions are open; detach when it is over")
        self._attached.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _follow_device(self) -> None:
        """The models are where they are now: what was made for another device is made anew."""
        device, before = self._attached.device(), self._capture.device
        if device is None or device == before:
            return
        if before is not None:
            if self._stash.live or self._offload.live:
                raise RuntimeError(
                    f"the model was moved from {before} to {device}, and tensors of an earlier step still wait; "
                    "move it when backward is over and nothing holds its graph"
                )
            self._measure()
        self._capture.device = device
        if self.policy.pool.device_bytes is not None and device.type != "meta":
            self.size_pool()

    def follow(self, schedule: Any) -> Any:
        """Know what a pipeline schedule does next, from its own plan; `remove()` what this returns to stop.

            schedule = ScheduleDualPipeV(stages, microbatches, loss_fn=loss)
            keeper.follow(schedule)                 # and every other schedule of the same stages
            with keeper.step():
                schedule.step(tokens)

        Groups are told apart by stage and microbatch; what is fetched next, and what stays because its backward
        follows at once, is as the plan says, also when another schedule has another number of microbatches. A
        `ValueError` if the schedule cannot be followed.
        """
        following = follow(schedule, self, self._recorder, self._habits)
        self._hooks.append(following)
        return following

    def expect(self, events: Sequence[Event], groups: dict[Key, Group]) -> None:
        """Before a step: what it will put and get, in order. Nothing happens while there is no plan at all yet."""
        if isinstance(self._offload, Offload) and not capturing():
            self._offload.expect(events, groups)

    def expected(self) -> dict[Key, Group]:
        """The groups of the step that is planned; empty before there is a plan."""
        return self._offload.plan.groups if isinstance(self._offload, Offload) else {}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A forward within is no part of the step: no region is opened, and everything it saves is kept."""
        before, self._watch.aside = self._watch.aside, True
        try:
            yield
        finally:
            self._watch.aside = before

    # --- step ---

    @contextmanager
    def step(self, *, check: bool = True) -> Iterator[None]:
        """One forward and backward, or several.

        A group that finds no page stays where it is, and the pool grows at the end. With `[pool] on_overflow =
        "raise"` it comes back as zeros instead, and the end raises `PoolOverflow`: on all ranks, where
        `torch.distributed` has several, which must therefore all have the same steps. Without `check` nobody
        looks: the caller feeds `keeper.overflow` to the optimizer (`GraphedStep` does).
        """
        if self._in_step:
            raise RuntimeError("keeper.step() is already open; a keeper runs one step at a time")
        if not self.policy.rules:  # nothing to do, at no cost
            yield
            return
        self._follow_device()
        if self._capture.device is not None and self._capture.device.type == "meta":
            raise RuntimeError("the model is on the meta device: model.to_empty(device=...) before a step")
        self._in_step = True
        self._watch.start()
        self._watch.outside = None
        self._capture.look = self._quiet
        self._offload.start()
        if isinstance(self._stash, Stash):
            self._stash.measured.reset_peak()
        self._capture.weights = storage_keys([*self.parameters(), *self.buffers()])
        marks = self._capture.marks
        marks.start(check=self._check is not False and not capturing())
        outer = frames()
        root = Region(self._capture, "", None, whole_step=True)
        enter(root)
        if self.pool is not None:
            self.pool.room.decides = check and self.policy.pool.on_overflow == "keep" and not capturing()
        leases: set[Ticket] = set() if self.pool is None else set(self.pool.leases)
        try:
            try:
                with torch.autograd.graph.saved_tensors_hooks(self._capture.pack, self._capture.unpack):
                    yield
            except BaseException:
                self._give_up(leases)
                raise
            finally:
                if self.pool is not None:
                    self.pool.room.decides = False
                self._in_step = False
                self._watch.stop()
                leave(root)
                set_frames(outer)
                if self._check is None and marks.checked:
                    self._check = False
                marks.forget()
                self._capture.forget()
                self._settle()
        except BaseException as error:
            if check and isinstance(error, Exception):
                # What a refused group's zeros lead to is no reason of its own.
                refuse_if_overflowed(self.pool, self._ranks, self.policy.pool, error)
            # The step is lost in any case; its overflow must not be taken for the next one's.
            if check and self.pool is not None:
                self.pool.reset()
            raise
        if check:
            self.size_pool()
            if isinstance(self._stash, Stash):
                make_room(self._stash.pool, self.policy.pool.headroom, self._stash.no_page)
            refuse_if_overflowed(self.pool, self._ranks, self.policy.pool)
        self._watch.refuse_compiled()
        if self._quiet is not None and not self._quiet.step_over(
            self._watch.openings, self._attached.own(), self._offload
        ):
            self._quiet = self._capture.look = None

    def _give_up(self, earlier: set[Ticket]) -> None:
        """An exception has ended the step: give back what it holds, but not the leases of `earlier` steps."""
        self._capture.give_up()
        pool = self.pool
        if pool is None:
            return
        for ticket in pool.leases - earlier:
            pool.release_later(ticket)
        if capturing():  # what was reserved in it never happened on the device
            if isinstance(self._offload, Offload):
                self._offload.settle()
            pool.discard()

    def _settle(self) -> None:
        # Offload first: it gives back pages, too.
        if isinstance(self._offload, Offload):
            self._offload.settle()
        if isinstance(self._stash, Stash):
            self._stash.settle()
        # A captured step is what it is; and pinning memory is no part of it.
        if isinstance(self._offload, Offload) and not capturing():
            self._offload.learn()

    # --- what it watches ---

    @property
    def device(self) -> torch.device | None:
        """Where the attached model is; None before `attach`."""
        return self._attached.device() or self._capture.device

    def modules(self) -> Iterator[nn.Module]:
        """Modules of the attached models."""
        return self._attached.modules()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the attached models, each once."""
        return self._attached.parameters()

    def buffers(self) -> Iterator[torch.Tensor]:
        """Buffers of the attached models, as far as they are state: flags and counters of a step are not."""
        return self._attached.buffers()

    # --- the pool ---

    @property
    def pool(self) -> PagePool | None:
        """The pool, or None while the first step is still to be measured."""
        return self._stash.pool if isinstance(self._stash, Stash) else None

    @property
    def overflow(self) -> torch.Tensor | None:
        """The pool's overflow flag, for an optimizer's `found_inf`; None before there is a pool."""
        return None if self.pool is None else self.pool.overflow

    @property
    def reservations(self) -> int:
        """Groups that were stashed so far; does not wait for the device."""
        return self._stash.pool.reservations if isinstance(self._stash, Stash) else self._stash.reservations

    def size_pool(self) -> bool:
        """Make the pool, and the plan of what is offloaded, from what was measured; whether there is a pool.

        Nothing happens while a backward is still to come, or where nothing was measured.
        """
        outlook = self._outlook()
        if isinstance(self._stash, MeasuredStash):
            pages = self._pages_wanted(self._stash, outlook)
            if pages is not None and (pages or self.policy.spill_bytes):
                self._make_pool(pages)
                if outlook is not None:  # what was measured had no pool
                    outlook.plan.tighten(pages * self.policy.pool.page_bytes)
        if outlook is not None and (self.pool is not None or not outlook.pages):
            self._plan_offload(outlook)
        return self.pool is not None

    def _pages_wanted(self, measured: MeasuredStash, outlook: Outlook | None) -> int | None:
        """Device pages; None while that is not known."""
        config = self.policy.pool
        if config.device_bytes is not None:
            return -(-config.device_bytes // config.page_bytes)
        if measured.pages or (isinstance(self._offload, MeasuredOffload) and self._offload.live):
            return None
        rest = 0 if outlook is None else outlook.pages
        return math.ceil((measured.peak_pages + rest) * config.headroom) or None

    def _outlook(self) -> Outlook | None:
        measured = self._offload
        return (
            measured.outlook(self.policy.pool.page_bytes) if isinstance(measured, MeasuredOffload) else None
        )

    def _plan_offload(self, outlook: Outlook) -> None:
        assert self._capture.device is not None
        slabs = HostSlabs(self._capture.device, self.policy.offload_bytes)
        slabs.fit(outlook.host_bytes)
        self._offload = self._homes["offload"] = Offload(
            self._capture.device,
            slabs,
            outlook.plan,
            outlook.split,
            self._keep,
            lambda: self._stash,
            self._recorder,
            tally=self._offload.tally,
            backend=self._backend,
        )

    def _make_pool(self, device_pages: int) -> None:
        assert self._capture.device is not None
        pool = PagePool(
            self._capture.device,
            self.policy.pool.page_bytes,
            device_pages=device_pages,
            host_bytes=self.policy.spill_bytes,
            backend=self._backend,
        )
        measured = self._stash.tally if isinstance(self._stash, MeasuredStash) else None
        stash = self._stash = self._homes["stash"] = Stash(pool, self._keep, measured)
        self._hand_out(stash)

    def _hand_out(self, stash: Stash) -> None:
        """Modules that write pages by themselves get the pool."""
        for name, module in self._attached.own_stash.items():
            module.use_pool(stash.pool, stash.account(name))

    def grow_pool(self) -> tuple[int, int]:
        """Grow the device tier to what was wanted, times the headroom; returns (pages wanted, pages had)."""
        assert self.pool is not None
        return grow(self.pool, self.policy.pool.headroom)

    # --- stats ---

    def reset_peaks(self) -> None:
        """Count peaks from now on; also clears the overflow flag."""
        for tally in (self._keep.tally, self._offload.tally, self._recompute.tally):
            tally.reset_peak()
        if isinstance(self._stash, MeasuredStash):
            self._stash.tally.reset_peak()
        else:
            self._stash.measured.reset_peak()
            self._stash.no_page.reset_peak()
        if self.pool is not None:
            self.pool.reset()

    def held(self) -> dict[HomeName, int | torch.Tensor]:
        """Valid bytes that wait in each home now; a pool's is a device integer, so that nothing waits for it."""
        stash = self._stash
        waiting: int | torch.Tensor
        if isinstance(stash, MeasuredStash):
            waiting = stash.tally.bytes
        else:
            waiting = stash.pool.memory.state[Counter.BYTES].clone()
        return {
            "keep": self._keep.tally.bytes,
            "stash": waiting,
            "offload": self._offload.tally.bytes,
            "recompute": self._recompute.tally.bytes,
        }

    def stats(self) -> KeeperStats:
        """Bytes and peak by home and region, and the pool's tiers. Waits for the device."""
        return collect(self._keep.tally, self._recompute.tally, self._stash, self._offload)

    def __repr__(self) -> str:
        size = (
            "unmeasured" if self.pool is None else format_bytes(self.pool.device_pages * self.pool.page_bytes)
        )
        return f"Keeper({len(self.policy.rules)} rules, pool {size})"
