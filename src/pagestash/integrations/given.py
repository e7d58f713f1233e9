"""What a user gives an adapter: a policy, its rules or its file, a budget, or a keeper."""

from collections.abc import Sequence
from pathlib import Path

from pagestash.keeper import Keeper
from pagestash.policy import Policy, Rule

Given = Policy | Sequence[Rule] | Keeper | str | float | Path


def keeper_of(given: Given, caller: str) -> Keeper:
    """The keeper for it. `caller` is who is told of in the `TypeError` for anything else."""
    if isinstance(given, Keeper):
        return given
    if isinstance(given, str) and not given.endswith(".toml") and not Path(given).exists():
        return Keeper(budget=given)
    if isinstance(given, int | float):
        return Keeper(budget=given)
    if isinstance(given, Policy | Sequence | Path):
        return Keeper(given)
    raise TypeError(
        f"{caller}: expected a policy, its rules or its file, a budget like '40GiB', or a Keeper; got {given!r}"
    )
