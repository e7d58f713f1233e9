"""`Profile`: what `ps.profile` returns: numbers, tables and a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

from pagestash.profiling.plot import plot
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.table import region_table, tensor_table

if TYPE_CHECKING:
    from rich.table import Table


class Profile(ProfiledStep):
    """Every tensor that one step saved for backward, with its regions and their times."""

    __slots__ = ()

    def table(self, *, depth: int | None = None, layers: bool = False, narrow: bool = False) -> "Table":
        """Regions as a rich table: layers merged unless `layers`, names shortened to `depth` parts.

        `narrow` fits 80 columns and omits what the link could hide.
        """
        return region_table(self, depth=depth, layers=layers, narrow=narrow)

    def tensor_table(self, match: str = "**") -> "Table":
        """The saved tensors of the regions that `match` names, as a rich table."""
        return tensor_table(self, match)

    def plot(self, path: str | Path) -> None:
        """Draw the saved bytes over the step, stacked by region, and also by home if there is a policy."""
        plot(self, Path(path))
