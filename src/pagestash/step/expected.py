"""Expected rows that change between steps: on all ranks after the same steps, because they capture together."""

from pagestash.saved.keeper import Keeper
from pagestash.saved.overflow import Agreement
from pagestash.saved.received_rows import decides_after, reads_after


class ExpectedRows:
    """Asks a keeper, now and again, whether its layers should expect another number of rows."""

    def __init__(self, keeper: Keeper, ranks: Agreement) -> None:
        self._keeper = keeper
        self._ranks = ranks
        self._steps = 0
        self._anywhere: bool | None = None
        """Whether any rank has layers whose rows are chosen; others take part in its votes."""

    def change(self) -> bool:
        """Count a step; whether any rank's keeper wants another number. Then all `adopt` and capture again."""
        if self._anywhere is None:
            self._anywhere = self._ranks.any(self._keeper.rows is not None)
        if not self._anywhere:
            return False
        mine = self.change_here()
        return self._ranks.any(mine) if decides_after(self._steps) else False

    def change_here(self) -> bool:
        """The same for this rank alone, where no graph is captured."""
        rows = self._keeper.rows
        self._steps += 1
        if rows is not None and reads_after(self._steps):
            rows.read()
        return rows is not None and decides_after(self._steps) and rows.decide()

    def adopt(self) -> None:
        """Let the new number take effect, where there is one."""
        if self._keeper.rows is not None:
            self._keeper.rows.adopt()

    def leave(self) -> bool:
        """Whether expected rows are offloaded on any rank, so that an eager step comes before the next capture."""
        rows = self._keeper.rows
        return self._ranks.any(rows is not None and rows.leave)
