"""The data types shared by matching, planning, lowering and kernels: pure data, standard library only.

`docs/glossary.md` defines the terms.  Matching creates a `Site`, whose `AttentionSpec` says what is computed; planning
makes a `Decision` about it; lowering and kernels read `AttentionSpec` and `Plan`.
"""

from .attention_spec import AttentionSpec, Order
from .components import Component, Dense, HeadInterval, Interval, Keys, Operand, Segments, VarlenLayout
from .dropout import Dropout
from .mask import MAX_LENGTH, Anchor, Band, Mask
from .operands import Bias
from .plan import Decision, Fallback, Plan, Tiles
from .reasons import Reason
from .site import DType, Site
from .traits import Traits

__all__ = [
    "MAX_LENGTH",
    "Anchor",
    "AttentionSpec",
    "Band",
    "Bias",
    "Component",
    "DType",
    "Decision",
    "Dense",
    "Dropout",
    "Fallback",
    "HeadInterval",
    "Interval",
    "Keys",
    "Mask",
    "Operand",
    "Order",
    "Plan",
    "Reason",
    "Segments",
    "Site",
    "Tiles",
    "Traits",
    "VarlenLayout",
]
