"""All judges of the monitor."""

from __future__ import annotations

from .judge import Judge
from .judges.data import SameData
from .judges.foreign import Foreign
from .judges.liveness import Liveness
from .judges.slow import Slow

JUDGES: tuple[type[Judge], ...] = (
    Liveness,
    Slow,
    Foreign,
    SameData,
)
