"""A row of `benchmarks/simulate.py`."""

from dataclasses import dataclass
from typing import Any

EFFECT = 0.5
"""The bar of a row that tells what something adds or saves, as a part of the published effect: that nothing happens
fails, and so does an effect that is half as large again."""


@dataclass(frozen=True)
class Row:
    """One published or measured figure and the prediction of it."""

    group: str
    what: str
    unit: str
    published: float
    predicted: float
    bar: float | None = None
    """Largest relative error that counts as met; None: listed, not scored."""
    cause: str = ""
    """Why it is likely missed."""

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        return self.predicted / self.published - 1

    @property
    def holds(self) -> bool | None:
        """Whether the bar is met; None: there is none."""
        return None if self.bar is None else abs(self.error) <= self.bar + 1e-9

    def to_json(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "what": self.what,
            "unit": self.unit,
            "published": self.published,
            "predicted": round(self.predicted, 4),
            "error": round(self.error, 4),
            "bar": self.bar,
            "holds": self.holds,
            "cause": "" if self.holds else self.cause,
        }
