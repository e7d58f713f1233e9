"""What a user gives an adapter: a policy, its rules or its file, a budget, or a keeper."""

from collections.abc import Sequence
from pathlib import Path

from pagestash.keeper import Keeper
from pagestash.policy import Policy, Rule

Given = Policy | Sequence[Rule] | Keeper | str | float | Path


def keeper_of(given: Given, caller: str, *, waits: bool = False) -> Keeper:
    """The keeper for it; a budget is planned for a loop that `waits`. A `TypeError` speaks of the `caller`."""
    if isinstance(given, Keeper):
        return given
    if isinstance(given, str) and not given.endswith(".toml") and not Path(given).exists():
        return Keeper(budget=given, waits=waits)
    if isinstance(given, int | float):
        return Keeper(budget=given, waits=waits)
    if isinstance(given, Policy | Sequence | Path):
        return Keeper(given)
    raise TypeError(
        f"{caller}: expected a policy, its rules or its file, a budget like '40GiB', or a Keeper; got {given!r}"
    )
