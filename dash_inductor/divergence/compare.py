"""The public names of `observers.recordings`."""

from ..observers.recordings.compare import Comparison, compare

__all__ = ["Comparison", "compare"]
