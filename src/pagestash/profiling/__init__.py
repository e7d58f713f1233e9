"""Profile a step: what each region saves for backward, and what each home would save and cost."""

from typing import TYPE_CHECKING

from pagestash.lazy import lazily

if TYPE_CHECKING:
    from pagestash.profiling.fit import Fit as Fit
    from pagestash.profiling.link import Link as Link
    from pagestash.profiling.measure import profile as profile
    from pagestash.profiling.records import HomeEstimate as HomeEstimate
    from pagestash.profiling.records import Region as Region
    from pagestash.profiling.records import SavedTensor as SavedTensor
    from pagestash.profiling.records import Segment as Segment
    from pagestash.profiling.result import Profile as Profile

_FOUND_IN = {
    "Fit": "pagestash.profiling.fit",
    "HomeEstimate": "pagestash.profiling.records",
    "Link": "pagestash.profiling.link",
    "Profile": "pagestash.profiling.result",
    "Region": "pagestash.profiling.records",
    "SavedTensor": "pagestash.profiling.records",
    "Segment": "pagestash.profiling.records",
    "profile": "pagestash.profiling.measure",
}
__all__ = sorted(_FOUND_IN)
__getattr__ = lazily(__name__, _FOUND_IN)
