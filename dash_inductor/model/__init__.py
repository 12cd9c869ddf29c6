"""The vocabulary between the parts, as pure data (standard library only); `docs/glossary.md` says what the words mean.

Matching writes a `Site`, whose `Call` says what is computed; planning makes the `Decision`; lowering and kernels read
`Call` and `Plan`.
"""

from .call import Bias, Call, Order
from .dropout import Dropout
from .mask import MAX_LENGTH, Anchor, Band, Mask
from .plan import Decision, Kept, Plan, Tiles
from .reasons import Reason
from .site import DType, Site
from .terms import Dense, Interval, Keys, Operand, Placed, Segments, Term
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
    "Interval",
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
    "Term",
    "Tiles",
    "Traits",
]
