"""All judges of the monitor."""

from __future__ import annotations

from . import bits
from .judge import Judge
from .judges.replay import ReplayJudge
from .judges.roll_call import RollCallJudge
from .judges.verdicts import Verdicts

JUDGES: tuple[type[Judge], ...] = (
    *bits.JUDGES,
    ReplayJudge,
    RollCallJudge,
    Verdicts,  # last: it heeds what all others have found
)
