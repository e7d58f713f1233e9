"""How many bytes are there in each segment of a step."""

from itertools import accumulate


class Levels:
    """Bytes over the segments of a step."""

    def __init__(self, count: int) -> None:
        self._during, self._after = [0] * (count + 1), [0] * (count + 1)

    def add(self, first: int, last: int, size: int) -> None:
        """So many are there in the segments from `first` to `last`, and gone at the end of that."""
        if last >= first:
            self._during[first] += size
            self._during[last + 1] -= size
            self._after[first] += size
            self._after[last] -= size

    def during(self) -> list[int]:
        """In each segment."""
        return list(accumulate(self._during[:-1]))

    def after(self) -> list[int]:
        """At the end of each."""
        return list(accumulate(self._after[:-1]))
