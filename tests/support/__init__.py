"""What test files share: comparisons, processes of several ranks, and uninitialised memory that shows."""

from support.compare import error, same

__all__ = ["error", "same"]
