"""Which home a policy gives each saved tensor, as a keeper decides it."""

from collections.abc import Sequence

from pagestash.policy import HomeName, Policy, Rule
from pagestash.profiling.records import Region, SavedTensor


def assign(policy: Policy, tensors: Sequence[SavedTensor], regions: Sequence[Region]) -> list[HomeName]:
    """The home of each tensor. If one tensor of a storage is kept, all of them are."""
    by_name = {region.name: region for region in regions}
    rules = {tensor.path: rule_of(policy, tensor.path) for tensor in tensors}
    remade = {
        storage
        for region in regions
        if region.name and (rule := policy.rule_for(region.name)) is not None and rule.home == "recompute"
        for storage in region.outputs
    }
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


def rule_of(policy: Policy, path: Sequence[str]) -> tuple[Rule | None, str]:
    """The rule of the innermost region in `path` that has one, and that region."""
    for name in reversed(path):
        rule = policy.rule_for(name) if name else None
        if rule is not None:
            return rule, name
    return None, ""


def _is_input(tensor: SavedTensor, found: tuple[Rule | None, str], by_name: dict[str, Region]) -> bool:
    rule, name = found
    return rule is not None and rule.home == "recompute" and tensor.storage in by_name[name].inputs
