"""Says, once and by name, when a rule moves nothing or a keeper's step is never opened, and why.

A rule without effect is no error, and nothing shows it but memory that is as large as before. So the first steps
are watched: of every tensor that is saved under a rule, what became of it. When two steps have saved anything, each
rule that moved no byte is named in a warning of the `pagestash` logger, with the reason that kept the most bytes
where they are. After that nothing is watched any more.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from pagestash.policy import Policy, Rule
from pagestash.saved.hooks import SavedTensorHooks
from pagestash.saved.module_hooks import Opening
from pagestash.saved.offload.moving import Offload
from pagestash.saved.packed import Handle, Kept, Packed
from pagestash.saved.reasons import (
    NO_EXPECTED_ROWS,
    NO_FRACTION,
    ONLY_WEIGHTS,
    WITHIN_WINDOW,
    kept_by,
    too_small,
)
from pagestash.saved.recompute.trees import tensors_of
from pagestash.saved.region import Region
from pagestash.saved.storage import plain_storage
from pagestash.sizes import format_bytes
from pagestash.torch_internals import backward_number, is_transformed

log = logging.getLogger("pagestash")

STEPS = 2
"""The first step is measured: it moves tensors that later steps may keep on the device."""
PASSES = 3
"""After so many backward passes outside of any step, `keeper.step()` was probably forgotten."""


@dataclass(slots=True)
class _Seen:
    """What happened to the tensors under one rule."""

    moved: bool = False
    apart: bool = False
    """Whether something moved that is not in an entry of another rule, which saved the same memory before."""
    elsewhere: bool = False
    """Whether a region of another rule recomputes something that is saved under this one."""
    offloaded: bool = False
    whole: bool = False
    smaller: bool = False
    """Whether what went to pages was as large there, and whether any was smaller."""
    coded: bool = False
    saved: int = 0
    """Bytes that were saved under it, without weights."""
    largest: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """Bytes that stayed on the device, by reason."""
    dtypes: set[torch.dtype] = field(default_factory=set)


class QuietRules:
    """Is told of every saved tensor in the first steps of a keeper (`SavedTensorHooks.look`)."""

    def __init__(self, policy: Policy, hooks: SavedTensorHooks) -> None:
        self._policy = policy
        self._saved = hooks
        watched = [rule for rule in policy.rules if rule.moves]
        self._rules = {rule: _Seen() for rule in watched}
        self._steps = 0
        self._saw = False

    def discarded_by(self, region: str) -> None:
        """An output of that region is not held where it is saved, or is an input of another that is recomputed."""
        maker = self._policy.rule_for(region)
        if maker in self._rules:
            self._rules[maker].moved = True

    def saw(self, region: Region, tensor: torch.Tensor, packed: Packed) -> None:
        """A tensor was saved in `region`, and packed as `packed`."""
        self._saw = True
        owner = region.claimed(plain_storage(tensor)) or region
        # (By its name: what has a known size is under a rule made from that.)
        rule = self._policy.rule_for(owner.name) or owner.rule
        if packed.recomputed_by:
            self.discarded_by(packed.recomputed_by)
        seen = self._rules.get(rule) if rule is not None else None
        if seen is None or rule is None:
            return
        if packed.recomputed_by and self._policy.rule_for(packed.recomputed_by) is not rule:
            seen.elsewhere = True
            return
        if packed.moved:
            seen.moved = True
            seen.apart |= not isinstance(packed, Handle) or packed.entry.rule == rule
            seen.offloaded |= owner.rule is not None and owner.rule.home == "offload"
            if isinstance(packed, Handle):
                entry = packed.entry
                seen.coded |= entry.dtype is not None
                seen.whole |= entry.rule == rule
                seen.smaller |= entry.rows is not None or entry.dtype is not None
            seen.dtypes.add(tensor.dtype)
        elif isinstance(packed, Kept):
            seen.dtypes.add(tensor.dtype)
            seen.saved += tensor.nbytes
            seen.largest = max(seen.largest, tensor.nbytes)
            reason = self._why_kept(owner, rule, tensor, packed)
            seen.reasons[reason] = seen.reasons.get(reason, 0) + tensor.nbytes

    def _why_kept(self, owner: Region, rule: Rule, tensor: torch.Tensor, kept: Kept) -> str:
        if tensor.device != self._saved.device:
            return f"its tensors are on {tensor.device}, and the model on {self._saved.device}"
        if tensor.nbytes < rule.least_bytes:
            return _SMALL
        if owner.rule is None:
            return "its tensors have a known size, so that there is nothing to compact"
        if kept.held.region != owner.name:
            return kept_by(kept.held.region)
        if rule.home == "recompute":
            return "it saves nothing but what it was given, which is held in any case"
        return "its tensors have no plain memory of their own to move"

    def step_over(self, openings: list[Opening], own: set[str], offload: Offload) -> bool:
        """A step is over. Returns whether to go on; `own`: names of modules that move tensors by themselves."""
        if not self._saw:
            return True  # an evaluation
        self._steps, self._saw = self._steps + 1, False
        if self._steps < STEPS:
            return True
        for rule, seen in self._rules.items():
            if rule.home == "stash" and rule.offloads:
                why = self._window(rule, offload) if seen.offloaded else NO_EXPECTED_ROWS
                if why is not None:
                    log.warning(
                        "rule %r: its fraction offloaded nothing in %d steps: %s", rule.match, STEPS, why
                    )
            mine = [opening for opening in openings if opening.rule is rule]
            if any(self._policy.rule_for(name) is rule for name in own):
                continue
            if rule.bits is not None and not seen.coded and seen.dtypes:
                dtypes = ", ".join(sorted(map(str, seen.dtypes)))
                log.warning(_NOT_CODED, rule.match, STEPS, rule.least_bytes, dtypes)
            if rule.home == "keep":
                continue
            if rule.home == "stash" and seen.whole and not seen.smaller:
                log.warning(_ALL_VALID, rule.match, STEPS)
            why = self._window(rule, offload) if rule.home == "offload" and seen.apart else None
            if why is None and not seen.moved and (seen.reasons or not seen.elsewhere):
                why = _reason(rule, seen, mine)
            if why is not None:
                log.warning("rule %r (%s) moved nothing in %d steps: %s", rule.match, rule.home, STEPS, why)
        return False

    def _window(self, rule: Rule, offload: Offload) -> str | None:
        """Why the plan moves nothing of a rule; None if it moves something."""
        if offload.plan is None or rule.match in offload.moved_rules:
            return None
        if not rule.fraction:
            return NO_FRACTION
        if offload.refused.peak:
            if offload.slabs.wanted <= offload.slabs.limit:
                return None  # the step was larger than those before; there will be room in the next
            return f"there is no host memory for it: [pool] host allows {format_bytes(offload.slabs.limit)}"
        return WITHIN_WINDOW


_SMALL = "too small"
_ALL_VALID = (
    "rule %r (stash) made nothing smaller in %d steps: no tensor under it has fewer valid rows than room for them, "
    "so pages take as much as it did. ps.rows(tensor, count) says how many are valid; offload or recompute the rest"
)
_NOT_CODED = (
    "rule %r: bits=8 coded nothing in %d steps. It codes bfloat16 and float16 tensors of at least %d bytes whose "
    "last dimension is 32 or more; there were tensors of %s"
)


def _reason(rule: Rule, seen: _Seen, openings: list[Opening]) -> str:
    if seen.reasons:
        reason = max(seen.reasons, key=lambda each: seen.reasons[each])
        if reason is _SMALL:
            return too_small(seen.largest, rule)
        return reason
    if any(opening.others for opening in openings):
        return (
            "gradient checkpointing (torch.utils.checkpoint, or other saved-tensor hooks) has what its regions "
            "save; switch it off for them"
        )
    if any(opening.ran for opening in openings):
        return ONLY_WEIGHTS
    if any(opening.no_grad for opening in openings):
        return "its regions ran without gradients only (reentrant checkpointing does that)"
    name = f" ({openings[0].name!r} for one)" if openings else ""
    return f"none of its regions{name} ran in a step, in the thread that opened it"


class StepNeverOpened:
    """Counts backward passes of a watched model before its keeper's first step."""

    def __init__(self) -> None:
        self._passes = 0
        self._last = -1

    def saw(self, output: Any) -> None:
        """A watched module returned `output` outside of a step."""
        for tensor in tensors_of(output):
            if tensor.requires_grad and not is_transformed(tensor):
                tensor.register_hook(self._backward)
                return

    def _backward(self, gradient: torch.Tensor) -> None:
        task = backward_number()
        self._passes += task != self._last
        again, self._last = task == self._last, task
        if self._passes == PASSES and not again:
            log.warning(
                "a keeper is attached, and %d backward passes ran outside of its `with keeper.step():`, so its "
                "rules do nothing; put forward and backward inside, or keeper.detach() one that is left over",
                PASSES,
            )
