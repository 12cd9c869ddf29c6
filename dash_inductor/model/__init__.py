"""The vocabulary between the parts, as pure data (standard library only); `docs/glossary.md` says what the words mean.

Matching writes a `Site`, whose `Call` says what is computed; planning makes the `Decision`; lowering and kernels read
`Call` and `Plan`.
"""

from .call import Bias, Call, Order
from .dropout import Dropout
from .mask import MAX_LENGTH, Anchor, Band, Dense, Keys, Mask, Operand, Placed, Segments
from .plan import Decision, Kept, Plan, Tiles
from .reasons import Reason
from .site import DType, Site
from .traits import Traits

__all__ = [
    "MAX_LENGTH",
    "Anchor",
    "Band",
    "Bias",
    "Call",
    "DType",
    "Decision",
    "Dense",
    "Dropout",
    "Kept",
    "Keys",
    "Mask",
    "Operand",
    "Order",
    "Placed",
    "Plan",
    "Reason",
    "Segments",
    "Site",
    "Tiles",
    "Traits",
]
