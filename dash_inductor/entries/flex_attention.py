"""FlexAttention, whose operator calls functions of the program: it is kept."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph

from ..model.reasons import Reason
from .attention import Found
from .operators import Refused, refusals

_FLEX = Refused("flex_attention", "flex_attention_backward", Reason.FLEX_ATTENTION)


def find(graph: Graph) -> Iterator[Found]:
    """The calls of a graph; see `Entry`."""
    return refusals(graph, [_FLEX])
