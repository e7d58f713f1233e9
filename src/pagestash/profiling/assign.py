"""Which home a policy gives each saved tensor: where a keeper puts it, and where its bytes are in the end."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from pagestash.policy import HomeName, Rule
from pagestash.profiling.expected_rows import find_heads
from pagestash.profiling.records import ALLOCATED, Kind, Region, SavedTensor
from pagestash.saved.recompute.chain import discards

UNTOUCHED: tuple[Kind, ...] = ("weight", "weight_view", "buffer")
"""Kinds that a keeper leaves where they are, and does not count."""


class Rules(Protocol):
    """A policy, or anything else that has a rule for a region."""

    def rule_for(self, name: str) -> Rule | None: ...


class TensorIndex:
    """What a policy asks of saved tensors again and again, found once."""

    def __init__(self, tensors: Sequence[SavedTensor]) -> None:
        self.tensors = tensors
        self.held = [(at, tensor) for at, tensor in enumerate(tensors) if tensor.kind not in UNTOUCHED]
        """Those that a policy may move or discard, and which of all tensors each is."""
        self.allocated = [
            (at, tensor, tensor.elsewhere) for at, tensor in self.held if tensor.kind in ALLOCATED
        ]
        """Of these, those that the step allocates, and whether anything else holds them."""
        self.bytes = {tensor.storage: tensor.storage_bytes for tensor in tensors}
        """Of each storage."""
        self.floating = {tensor.storage for tensor in tensors if "float" in tensor.dtype}
        self.once: dict[int, set[str]] = {}
        """By storage: the regions in which `ps.once` saved it."""
        self.inside: dict[str, list[int]] = {}
        """By region: the storages that were saved in it, without weights and buffers."""
        paths: dict[tuple[str, ...], int] = {}
        self._path_of = [paths.setdefault(tensor.path, len(paths)) for tensor in tensors]
        """The number of each tensor's path."""
        self._paths = len(paths)
        self._places: dict[str, list[tuple[int, int]]] = {}
        """By region: the numbers of the paths that it is in, and its depth there."""
        for path, number in paths.items():
            for depth, name in enumerate(path):
                if name:
                    self._places.setdefault(name, []).append((number, depth))
        self._recomputed: dict[str, tuple[set[int], int]] = {}
        for tensor in tensors:
            if tensor.once:
                self.once.setdefault(tensor.storage, set()).update(tensor.path)
            if tensor.kind not in UNTOUCHED:
                for name in tensor.path:
                    self.inside.setdefault(name, []).append(tensor.storage)

    def rules(self, policy: Rules) -> "TensorRules":
        """For each tensor: the rule of the innermost region that has one, and that region."""
        found: list[tuple[Rule | None, str]] = [(None, "")] * self._paths
        depths = [-1] * self._paths
        for name, places in self._places.items():
            rule = policy.rule_for(name)
            if rule is not None:
                for number, depth in places:
                    if depth > depths[number]:
                        found[number], depths[number] = (rule, name), depth
        return [found[number] for number in self._path_of]

    def within(self, names: Iterable[str]) -> list[bool]:
        """For each tensor: whether one of these regions is around it."""
        found = [False] * self._paths
        for name in names:
            for number, _ in self._places.get(name, ()):
                found[number] = True
        return [found[number] for number in self._path_of]

    def held_once(self, storage: int, name: str) -> bool:
        """Whether `ps.once` saved the storage inside that region."""
        return name in self.once.get(storage, ())

    def recomputed(self, region: Region) -> tuple[set[int], int]:
        """The outputs that a recomputed region discards, and the bytes that its replay brings back.

        No policy changes them: they are found once.
        """
        found = self._recomputed.get(region.name)
        if found is None:
            name, inputs = region.name, region.inputs
            outputs = {
                storage
                for storage in region.outputs
                if storage in self.floating and storage not in inputs and not self.held_once(storage, name)
            }
            saved = {
                storage
                for storage in self.inside.get(name, ())
                if storage not in inputs and not self.held_once(storage, name)
            }
            size = sum(self.bytes[storage] for storage in saved | outputs)
            found = self._recomputed[name] = outputs, size
        return found


def assign(policy: Rules, tensors: Sequence[SavedTensor], regions: Sequence[Region]) -> list[HomeName]:
    """Where the bytes of each tensor are. If one tensor of a storage is kept, all of them are."""
    index = TensorIndex(tensors)
    rules, recomputed = index.rules(policy), Recomputing(policy, index, regions)
    return _with_heads(_assign(index, rules, recomputed), tensors, recomputed, rules)


def _assign(index: TensorIndex, rules: "TensorRules", recomputed: "Recomputing") -> list[HomeName]:
    homes: list[HomeName] = ["keep"] * len(index.tensors)
    makers, kept = recomputed.makers, set(recomputed.kept_inputs)
    moved: list[tuple[int, int]] = []
    for at, tensor, elsewhere in index.allocated:
        found, name = rules[at]
        storage = tensor.storage
        if found is None and storage not in makers:
            kept.add(storage)
            continue
        home: HomeName = "keep"
        if found is not None and not elsewhere and tensor.bytes >= found.least_bytes:
            home = found.home
        if home == "recompute":
            if recomputed.holds(storage, name):
                home = recomputed.home_of_input(storage, name, tensor.path)
            else:
                if not tensor.once:
                    recomputed.discarded[storage] = name
                if index.held_once(storage, name):
                    home = recomputed.home_around(name, tensor.path)
        elif home == "keep" and storage in makers and not recomputed.holds(storage, name):
            home = "recompute"  # recomputed with the region whose output it is
        if home == "keep":
            kept.add(storage)
        else:
            homes[at] = home
            moved.append((at, storage))
    for at, storage in moved:
        if storage in kept:
            homes[at] = "keep"
    return homes


def assign_when_saved(policy: Rules, index: TensorIndex, recomputed: "Recomputing") -> list[HomeName]:
    """The home that a keeper gives each tensor when it is saved, which is what it moves.

    A keeper does not know what comes later, nor who holds a storage without saving it. So it also moves

    - a tensor that a later region saves and keeps (the output of attention, which the projection after it saves);
    - a tensor that user code or the model's output holds.

    Their bytes stay on the device in any case: `assign` says `keep`. What an earlier region keeps is not moved, nor
    what is held for a replay of a region around. An input of a recomputed region moves with the region around.
    """
    rules = index.rules(policy)
    made = recomputed.makers
    kept: set[int] = set()
    final = _assign(index, rules, recomputed)
    homes: list[HomeName] = ["keep"] * len(final)
    for at, tensor in index.held:
        rule, name = rules[at]
        storage = tensor.storage
        if storage in kept:
            continue
        if final[at] == "recompute":
            homes[at] = "recompute"
            continue
        if rule is not None and rule.home == "recompute" and recomputed.holds(storage, name):
            rule = recomputed.rule_around(name, tensor.path)
        if rule is None or rule.home not in ("stash", "offload") or tensor.bytes < rule.least_bytes:
            kept.add(storage)
        elif storage in made:
            homes[at] = "recompute"
        elif recomputed.held_around(tensor):
            kept.add(storage)
        else:
            homes[at] = rule.home
    return _with_heads(homes, index.tensors, recomputed, rules)


def _with_heads(
    homes: list[HomeName], tensors: Sequence[SavedTensor], recomputed: "Recomputing", rules: "TensorRules"
) -> list[HomeName]:
    """The homes, where the expected rows of a stash rule that has a `fraction` are offloaded."""
    if "stash" not in homes or not any(
        rule is not None and rule.home == "stash" and rule.offloads for rule, _ in rules
    ):
        return homes
    heads = {head.storage for head in find_heads(tensors, recomputed.profiled).values()}
    found: list[HomeName] = []
    for home, tensor, (rule, _) in zip(homes, tensors, rules):
        leaves = home == "stash" and tensor.storage in heads and rule is not None and rule.offloads
        found.append("offload" if leaves else home)
    return found


def rule_of(policy: Rules, path: Sequence[str], *, skip: HomeName | None = None) -> tuple[Rule | None, str]:
    """The rule of the innermost region in `path` that has one, and that region; not one whose home is `skip`."""
    for name in reversed(path):
        rule = policy.rule_for(name) if name else None
        if rule is not None and rule.home != skip:
            return rule, name
    return None, ""


class Recomputing:
    """The recomputed regions of a policy: their inputs, which are held, and their outputs, which are discarded."""

    def __init__(
        self, policy: Rules, index: TensorIndex, regions: Sequence[Region], *, remakes: bool = True
    ) -> None:
        """Without `remakes`, what no operation saves is taken to be held for every replay."""
        self.makers: dict[int, Region] = {}
        """By storage: the recomputed region whose discarded output it is."""
        self.kept_inputs: set[int] = set()
        """Inputs of recomputed regions that stay on the device."""
        self.discarded: dict[int, str] = {}
        """By storage: the region that discards a tensor in it, whatever home others give the storage."""
        self._remade: dict[int, Region] = {}
        """By storage that no operation saves: the recomputed region that can make it again."""
        self.regions: dict[str, Region] = {}
        self.profiled = regions
        """All regions of the profile."""
        self._policy, self._index = policy, index
        self._around: dict[tuple[str, ...], Rule | None] = {}
        """By path: the rule of the innermost region in it that has one."""
        self._replay_bytes: dict[str, int] = {}
        """What a replay brings back, with the replays that it needs for its inputs."""
        for region in regions:
            rule = policy.rule_for(region.name) if region.name else None
            if rule is not None and rule.home == "recompute":
                self.regions[region.name] = region
        for region in self.regions.values():  # in the order of forward
            self._add(region, remakes)

    def _add(self, region: Region, remakes: bool) -> None:
        outputs, size = self._index.recomputed(region)
        for storage in region.inputs:
            maker = self.makers.get(storage)
            if maker is not None and self._chained(storage) and self._asks(region):
                size += self._replay_bytes[maker.name]
            elif self._outer_home(region) == "keep":
                self.kept_inputs.add(storage)
        size += sum(self._replay_bytes[maker.name] for _, _, maker in self.remade_for(region))
        size += sum(unsaved for _, unsaved in region.unsaved_outputs)
        self._replay_bytes[region.name] = size
        for storage in outputs:
            self.makers[storage] = region
        for storage, unsaved in region.unsaved_outputs:
            if remakes and region.calls == 1 and discards(size, unsaved):
                self._remade[storage] = region

    def remade_for(self, region: Region) -> list[tuple[int, int, Region]]:
        """Inputs of a recomputed region that no operation saves and that are not held: storage, bytes, and the
        region that makes them again for its replay.

        Where one of both runs several times, all are taken to be held: a profile does not say whose call made what.
        """
        if region.calls != 1 or not self._asks(region):
            return []
        found = ((storage, size, self._remade.get(storage)) for storage, size in region.unsaved_inputs)
        return [(storage, size, maker) for storage, size, maker in found if maker is not None]

    def holds(self, storage: int, name: str) -> bool:
        """Whether the storage is an input of that region, if it is a recomputed one."""
        return name in self.regions and storage in self.regions[name].inputs

    def held_around(self, tensor: SavedTensor) -> bool:
        """Whether a region around it holds the tensor's storage on the device, since before the tensor was saved.

        A region's inputs are such. So are, in a profile, results of `ps.once`, which go to the innermost home
        instead: they are choices, not floating-point.
        """
        if tensor.storage not in self.kept_inputs or "float" not in tensor.dtype:
            return False
        return any(self.holds(tensor.storage, name) for name in tensor.path)

    def home_of_input(self, storage: int, name: str, path: tuple[str, ...]) -> HomeName:
        """The home of a storage that is an input of the recomputed region `name`: that of the region around it."""
        if storage in self.makers and self._chained(storage) and self._asks(self.regions[name]):
            return "recompute"
        return self.home_around(name, path)

    def home_around(self, name: str, path: tuple[str, ...]) -> HomeName:
        """The home of what is held for a replay of the region `name` in `path`."""
        rule = self.rule_around(name, path)
        return "keep" if rule is None or rule.home == "recompute" else rule.home

    def rule_around(self, name: str, path: tuple[str, ...]) -> Rule | None:
        """The rule of the region around the region `name` in `path`. (A module may run in several places.)"""
        around = path[: path.index(name)]
        if around not in self._around:
            self._around[around] = rule_of(self._policy, around)[0]
        return self._around[around]

    def region_around(self, name: str) -> str:
        """The region around the region `name` whose rule moves what is held for a replay."""
        return rule_of(self._policy, self.regions[name].path[:-1], skip="recompute")[1]

    def _outer_home(self, region: Region) -> HomeName:
        rule = self.rule_around(region.name, region.path)
        return "keep" if rule is None else rule.home

    def _asks(self, region: Region) -> bool:
        """Whether an input of it may be made again by another: not where a rule keeps what is around."""
        rule = self.rule_around(region.name, region.path)
        return rule is None or rule.moves

    def _chained(self, storage: int) -> bool:
        return discards(self._replay_bytes[self.makers[storage].name], self._index.bytes[storage])


TensorRules = list[tuple[Rule | None, str]]
