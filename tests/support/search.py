"""Searches for plans with little effort, for tests of what does not depend on how good a plan is."""

from pagestash.planning import candidates, search

EFFORT = (
    (search, "MOST", 30),
    (candidates, "EXHAUSTIVE", 100),
    (candidates, "EXHAUSTIVE_ON_A_RANK", 100),
)


def search_little(patch) -> None:
    """For as long as the patch holds."""
    for module, name, little in EFFORT:
        patch.setattr(module, name, little)
