"""Device bytes of each home over the segments of a step."""

from itertools import accumulate, islice

from pagestash.policy import HOMES, HomeName


class HomeBytes:
    """Changes of each home's bytes at the beginning of each segment."""

    def __init__(self, count: int) -> None:
        """Of a step with so many segments."""
        self.changes: dict[HomeName, list[int]] = {home: [0] * (count + 1) for home in HOMES}
        self._count = count

    def add(self, home: HomeName, first: int, last: int, size: int) -> None:
        """So many bytes are there from segment `first` to `last`."""
        if last >= first:
            self.changes[home][first] += size
            self.changes[home][last + 1] -= size

    def levels(self) -> dict[HomeName, list[int]]:
        """Bytes in each segment."""
        return {home: list(islice(accumulate(own), self._count)) for home, own in self.changes.items()}
