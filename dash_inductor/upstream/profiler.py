"""Fast access to PyTorch's profiler, for code that is called often."""

from __future__ import annotations

from torch._C._profiler import _RecordFunctionFast as Span
from torch.autograd import profiler as _profiler

__all__ = ["Span", "is_on"]


def is_on() -> bool:
    """Whether a profiler is recording; it then shows each `Span` under its name."""
    return _profiler._is_profiler_enabled
