"""Which home a policy gives each saved tensor: where a keeper puts it, and where its bytes are in the end."""

from collections.abc import Sequence
from typing import Protocol

from pagestash.policy import HomeName, Rule
from pagestash.profiling.records import Kind, Region, SavedTensor
from pagestash.saved.recompute.chain import discards

UNTOUCHED: tuple[Kind, ...] = ("weight", "weight_view", "buffer")
"""Kinds that a keeper leaves where they are, and does not count."""


class Rules(Protocol):
    """A policy, or anything else that has a rule for a region."""

    def rule_for(self, name: str) -> Rule | None: ...


def assign(policy: Rules, tensors: Sequence[SavedTensor], regions: Sequence[Region]) -> list[HomeName]:
    """Where the bytes of each tensor are. If one tensor of a storage is kept, all of them are."""
    return _assign(tensors, _rules(policy, tensors), Recomputing(policy, tensors, regions))


def _assign(tensors: Sequence[SavedTensor], rules: "PathRules", recomputed: "Recomputing") -> list[HomeName]:
    homes: list[HomeName] = []
    for tensor in tensors:
        found, name = rules[tensor.path]
        home: HomeName = "keep"
        if found is not None and tensor.bytes >= found.least_bytes and not tensor.elsewhere:
            home = found.home
        is_input = found is not None and recomputed.holds(tensor.storage, name)
        if home == "recompute" and is_input:
            home = recomputed.home_of_input(tensor, name)
        elif home == "recompute" and recomputed.held_once(tensor.storage, name):
            home = recomputed.home_around(name)
        elif home == "keep" and tensor.storage in recomputed.makers and not is_input:
            home = "recompute"  # recomputed with the region whose output it is
        homes.append(home if tensor.kind in ("activation", "weight_cast") else "keep")
    kept = {tensor.storage for tensor, home in zip(tensors, homes) if home == "keep"} | recomputed.kept_inputs
    return ["keep" if tensor.storage in kept else home for tensor, home in zip(tensors, homes)]


def assign_when_saved(
    policy: Rules,
    tensors: Sequence[SavedTensor],
    regions: Sequence[Region],
    recomputing: "Recomputing | None" = None,
) -> list[HomeName]:
    """The home that a keeper gives each tensor when it is saved, which is what it moves.

    A keeper does not know what comes later, nor who holds a storage without saving it. So it also moves

    - a tensor that a later region saves and keeps (the output of attention, which the projection after it saves);
    - a tensor that user code or the model's output holds.

    Their bytes stay on the device in any case: `assign` says `keep`. What an earlier region keeps is not moved.
    """
    rules = _rules(policy, tensors)
    recomputed = recomputing or Recomputing(policy, tensors, regions)
    made = recomputed.makers
    kept: set[int] = set()
    homes: list[HomeName] = []
    for tensor, final in zip(tensors, _assign(tensors, rules, recomputed)):
        rule, _ = rules[tensor.path]
        moves = rule is not None and rule.home in ("stash", "offload") and tensor.bytes >= rule.least_bytes
        home: HomeName = "keep"
        if tensor.kind not in UNTOUCHED and tensor.storage not in kept:
            if final == "recompute" or (moves and tensor.storage in made):
                home = "recompute"
            elif moves and rule is not None:
                home = rule.home
            else:
                kept.add(tensor.storage)
        homes.append(home)
    return homes


def rule_of(policy: Rules, path: Sequence[str]) -> tuple[Rule | None, str]:
    """The rule of the innermost region in `path` that has one, and that region."""
    for name in reversed(path):
        rule = policy.rule_for(name) if name else None
        if rule is not None:
            return rule, name
    return None, ""


class Recomputing:
    """The recomputed regions of a policy: their inputs, which are held, and their outputs, which are discarded."""

    def __init__(self, policy: Rules, tensors: Sequence[SavedTensor], regions: Sequence[Region]) -> None:
        self.makers: dict[int, Region] = {}
        """By storage: the recomputed region whose discarded output it is."""
        self.kept_inputs: set[int] = set()
        """Inputs of recomputed regions that stay on the device."""
        self.regions: dict[str, Region] = {}
        self._policy = policy
        self._replay_bytes: dict[str, int] = {}
        """What a replay brings back, with the replays that it needs for its inputs."""
        self._bytes: dict[int, int] = {}
        self._once: dict[int, set[str]] = {}
        """By storage: the regions in which `ps.once` saved it."""
        floating: set[int] = set()
        for tensor in tensors:
            self._bytes[tensor.storage] = tensor.storage_bytes
            if "float" in tensor.dtype:
                floating.add(tensor.storage)
            if tensor.once:
                self._once.setdefault(tensor.storage, set()).update(tensor.path)
        for region in regions:
            rule = policy.rule_for(region.name) if region.name else None
            if rule is not None and rule.home == "recompute":
                self.regions[region.name] = region
        brought = self._brought_back(tensors) if self.regions else {}
        for region in self.regions.values():  # in the order of forward
            self._add(region, brought[region.name], floating)

    def _brought_back(self, tensors: Sequence[SavedTensor]) -> dict[str, set[int]]:
        """By region: what was saved in it and is no input of it."""
        brought: dict[str, set[int]] = {name: set() for name in self.regions}
        for tensor in tensors:
            if tensor.kind not in UNTOUCHED:
                for name in tensor.path:
                    held = self.holds(tensor.storage, name) or self.held_once(tensor.storage, name)
                    if name in brought and not held:
                        brought[name].add(tensor.storage)
        return brought

    def _add(self, region: Region, brought: set[int], floating: set[int]) -> None:
        outputs = {
            storage
            for storage in region.outputs
            if storage in floating
            and storage not in region.inputs
            and not self.held_once(storage, region.name)
        }
        size = sum(self._bytes[storage] for storage in brought | outputs)
        for storage in region.inputs:
            maker = self.makers.get(storage)
            if maker is not None and self._chained(storage):
                size += self._replay_bytes[maker.name]
            elif self._outer_home(region) == "keep":
                self.kept_inputs.add(storage)
        self._replay_bytes[region.name] = size
        for storage in outputs:
            self.makers[storage] = region

    def holds(self, storage: int, name: str) -> bool:
        """Whether the storage is an input of that region, if it is a recomputed one."""
        return name in self.regions and storage in self.regions[name].inputs

    def held_once(self, storage: int, name: str) -> bool:
        """Whether `ps.once` saved the storage inside that region."""
        return name in self._once.get(storage, ())

    def home_of_input(self, tensor: SavedTensor, name: str) -> HomeName:
        """The home of a tensor that is an input of the recomputed region `name`: that of the region around it."""
        if tensor.storage in self.makers and self._chained(tensor.storage):
            return "recompute"
        return self.home_around(name)

    def home_around(self, name: str) -> HomeName:
        """The home of what is held for a replay of the region `name`."""
        home = self._outer_home(self.regions[name])
        return "keep" if home == "recompute" else home

    def _outer_home(self, region: Region) -> HomeName:
        rule, _ = rule_of(self._policy, region.path[:-1])
        return "keep" if rule is None else rule.home

    def _chained(self, storage: int) -> bool:
        return discards(self._replay_bytes[self.makers[storage].name], self._bytes[storage])


PathRules = dict[tuple[str, ...], tuple[Rule | None, str]]


def _rules(policy: Rules, tensors: Sequence[SavedTensor]) -> PathRules:
    """By path: its rule, and the region that has it."""
    return {path: rule_of(policy, path) for path in {tensor.path for tensor in tensors}}
