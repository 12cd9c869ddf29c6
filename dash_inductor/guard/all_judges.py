"""The judges of a guard, in the order in which they are asked."""

from __future__ import annotations

from .judge import Judge
from .judges.data import SameData
from .judges.doors import Doors
from .judges.foreign import Foreign
from .judges.learned import Learned
from .judges.liveness import Liveness
from .judges.replay import ReplayJudge
from .judges.replicas import Replicas
from .judges.rest import Rest
from .judges.roll_call import RollCallJudge
from .judges.slow import Slow
from .judges.verdicts import Verdicts
from .judges.wires import Wires

BITS: tuple[type[Judge], ...] = (Rest, Doors, Wires, Learned, Replicas)
"""Those that accuse a rank by itself come first: they break ties."""

JUDGES: tuple[type[Judge], ...] = (Liveness, Slow, Foreign, SameData, *BITS, ReplayJudge, RollCallJudge, Verdicts)
"""The last one heeds what all others have found."""
