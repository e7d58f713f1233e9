"""Which home a policy gives each saved tensor: where a keeper puts it, and where its bytes are in the end."""

from collections.abc import Sequence

from pagestash.policy import HomeName, Policy, Rule
from pagestash.profiling.records import Kind, Region, SavedTensor

UNTOUCHED: tuple[Kind, ...] = ("weight", "weight_view", "buffer")
"""Kinds that a keeper leaves where they are, and does not count."""


def assign(policy: Policy, tensors: Sequence[SavedTensor], regions: Sequence[Region]) -> list[HomeName]:
    """Where the bytes of each tensor are. If one tensor of a storage is kept, all of them are."""
    by_name = {region.name: region for region in regions}
    rules = {tensor.path: rule_of(policy, tensor.path) for tensor in tensors}
    remade = _remade(policy, regions)
    homes: list[HomeName] = []
    for tensor in tensors:
        found, name = rules[tensor.path]
        home: HomeName = "keep"
        if found is not None and tensor.bytes >= found.least_bytes and not tensor.elsewhere:
            home = found.home
        if home == "recompute" and tensor.storage in by_name[name].inputs:
            home = "keep"  # a region is recomputed from its inputs
        elif (
            home == "keep" and tensor.storage in remade and not _is_input(tensor, rules[tensor.path], by_name)
        ):
            home = "recompute"  # recomputed with the region whose output it is
        homes.append(home if tensor.kind in ("activation", "weight_cast") else "keep")
    kept = {tensor.storage for tensor, home in zip(tensors, homes) if home == "keep"}
    return ["keep" if tensor.storage in kept else home for tensor, home in zip(tensors, homes)]


def assign_when_saved(
    policy: Policy, tensors: Sequence[SavedTensor], regions: Sequence[Region]
) -> list[HomeName]:
    """The home that a keeper gives each tensor when it is saved, which is what it moves.

    A keeper does not know what comes later, nor who holds a storage without saving it. So it also moves

    - a tensor that a later region saves and keeps (the output of attention, which the projection after it saves);
    - a tensor that user code or the model's output holds.

    Their bytes stay on the device in any case: `assign` says `keep`. What an earlier region keeps is not moved.
    """
    remade = _remade(policy, regions)
    kept: set[int] = set()
    homes: list[HomeName] = []
    for tensor, final in zip(tensors, assign(policy, tensors, regions)):
        rule, _ = rule_of(policy, tensor.path)
        moves = rule is not None and rule.home in ("stash", "offload") and tensor.bytes >= rule.least_bytes
        home: HomeName = "keep"
        if tensor.kind not in UNTOUCHED and tensor.storage not in kept:
            if final == "recompute" or (moves and tensor.storage in remade):
                home = "recompute"
            elif moves and rule is not None:
                home = rule.home
            else:
                kept.add(tensor.storage)
        homes.append(home)
    return homes


def rule_of(policy: Policy, path: Sequence[str]) -> tuple[Rule | None, str]:
    """The rule of the innermost region in `path` that has one, and that region."""
    for name in reversed(path):
        rule = policy.rule_for(name) if name else None
        if rule is not None:
            return rule, name
    return None, ""


def _remade(policy: Policy, regions: Sequence[Region]) -> set[int]:
    """Storages of the outputs of recomputed regions."""
    return {
        storage
        for region in regions
        if region.name and (rule := policy.rule_for(region.name)) is not None and rule.home == "recompute"
        for storage in region.outputs
    }


def _is_input(tensor: SavedTensor, found: tuple[Rule | None, str], by_name: dict[str, Region]) -> bool:
    rule, name = found
    return rule is not None and rule.home == "recompute" and tensor.storage in by_name[name].inputs
