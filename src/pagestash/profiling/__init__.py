"""Profile a step: what each region saves for backward, and what each home would save and cost."""

from pagestash.profiling.fit import Fit
from pagestash.profiling.link import Link
from pagestash.profiling.measure import profile
from pagestash.profiling.records import HomeEstimate, Region, SavedTensor, Segment
from pagestash.profiling.result import Profile

__all__ = ["Fit", "HomeEstimate", "Link", "Profile", "Region", "SavedTensor", "Segment", "profile"]
