"""`Profile`: what `ps.profile` returns, as numbers, as tables and as a picture."""

from pathlib import Path

from rich.table import Table

from pagestash.profiling.plot import plot
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.table import region_table, tensor_table


class Profile(ProfiledStep):
    """Every tensor that one step saved for backward, its regions, and the step they belong to."""

    __slots__ = ()

    def table(self, *, depth: int | None = None, layers: bool = False, narrow: bool = False) -> Table:
        """Regions as a rich table: layers together unless `layers`, names cut to `depth` parts.

        `narrow` makes it fit 80 columns, without what the link could hide.
        """
        return region_table(self, depth=depth, layers=layers, narrow=narrow)

    def tensor_table(self, match: str = "**") -> Table:
        """The saved tensors of the regions that `match` names, as a rich table."""
        return tensor_table(self, match)

    def plot(self, path: str | Path) -> None:
        """Draw the bytes over the step, stacked by region, and by home where there is a policy."""
        plot(self, Path(path))
