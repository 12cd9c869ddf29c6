"""The judges of a guard, in the order in which they are asked."""

from __future__ import annotations

from .data import SameData
from .doors import Doors
from .foreign import Foreign
from .judge import Judge
from .learned import Learned
from .liveness import Liveness
from .replay import ReplayJudge
from .replicas import Replicas
from .rest import Rest
from .roll_call import RollCallJudge
from .slow import Slow
from .verdicts import Verdicts
from .wires import Wires

BITS: tuple[type[Judge], ...] = (Rest, Doors, Wires, Learned, Replicas)
"""Those that accuse a rank by itself come first: they break ties."""

JUDGES: tuple[type[Judge], ...] = (Liveness, Slow, Foreign, SameData, *BITS, ReplayJudge, RollCallJudge, Verdicts)
"""The last one heeds what all others have found."""
