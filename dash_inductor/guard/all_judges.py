"""The judges of a guard, in the order in which they are asked."""

from __future__ import annotations

from . import bits
from .judge import Judge
from .judges.data import SameData
from .judges.foreign import Foreign
from .judges.liveness import Liveness
from .judges.replay import ReplayJudge
from .judges.roll_call import RollCallJudge
from .judges.slow import Slow
from .judges.verdicts import Verdicts

JUDGES: tuple[type[Judge], ...] = (
    Liveness,
    Slow,
    Foreign,
    SameData,
    *bits.JUDGES,
    ReplayJudge,
    RollCallJudge,
    Verdicts,  # last: it heeds what all others have found
)
