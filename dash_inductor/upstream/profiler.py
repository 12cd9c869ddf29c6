"""PyTorch's profiler, as code that is called often asks for it."""

from __future__ import annotations

from torch._C._profiler import _RecordFunctionFast as Span
from torch.autograd import profiler as _profiler

__all__ = ["Span", "is_on"]


def is_on() -> bool:
    """Whether a profiler records now; it shows each `Span` under its name."""
    return _profiler._is_profiler_enabled
