"""Known defects by which PyTorch's compiler gives wrong results silently: their versions, and where they apply.

The table has three users: `install.defects` and `install.barriers` avoid the faulty parts, records name the defect that
a graph would have met, and the doctor prints the defects of the installed version.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .compat import TORCH


@dataclass(frozen=True)
class Defect:
    """A defect by which PyTorch's compiler gives wrong results without an error.

    Attributes:
        name: its name in records.
        versions: the first and the last minor version of PyTorch with the defect, among those that are supported.
        reports: the numbers of PyTorch's issues about it.
        what: what goes wrong, a sentence.
        remedy: what dash_inductor does about it under deterministic algorithms.
    """

    name: str
    versions: tuple[tuple[int, int], tuple[int, int]]
    reports: tuple[int, ...]
    what: str
    remedy: str

    @property
    def applies(self) -> bool:
        """Whether the installed PyTorch has the defect."""
        first, last = self.versions
        return first <= TORCH <= last


MIXED_ORDER = Defect(
    "mixed_order_reduction",
    ((2, 10), (2, 14)),
    (193061,),
    "Inductor fuses sums along rows and along columns, and loses a sum that lies in a part of another tensor: the "
    "gradient of a table of scales and shifts that modulated norms share is memory that nobody has written.",
    "Such a sum is not fused; others are.",
)
UNCHECKED_ATTENTION = Defect(
    "unchecked_attention",
    ((2, 10), (2, 14)),
    (195320, 196468),
    "Inductor's `fuse_attention` does not look at dimensions: it takes a softmax over queries or heads for one over "
    "keys, and any permutation of keys for a transposition.",
    "Each match is traced again with its shapes, and compared with all numbers, as PyTorch 2.15 does; what differs is "
    "not fused.",
)
NO_BARRIER = Defect(
    "no_barrier",
    ((2, 10), (2, 14)),
    (190519,),
    "A kernel that Inductor generates for a GPU may write a tensor in one loop and read it in the next, by other "
    "threads, for which nothing waits: what was there before is read, if it is fast enough.",
    "Such a read waits (`install.barriers`); it leaves no record.",
)
DEFECTS = (MIXED_ORDER, UNCHECKED_ATTENTION, NO_BARRIER)


def lost_sums(node1: Any, node2: Any) -> list[str]:
    """The names of buffers whose values `MIXED_ORDER` would lose if Inductor fused two scheduler nodes.

    The code generated for sums along columns binds a new tensor to the name of their buffer.  For a buffer with a
    layout of its own that is correct; a buffer that is part of another one, as in a concatenation, loses its values.
    """
    from torch._inductor.scheduler import MixOrderReduction

    return sums_elsewhere(node2 if MixOrderReduction.is_contiguous_node(node1) else node1)


def sums_along_columns_elsewhere(node: Any) -> list[str]:
    """The names of buffers whose values `MIXED_ORDER` would lose if a scheduler node joined an already fused kernel."""
    from torch._inductor.scheduler import FusedMixOrderReductions, MixOrderReduction

    if isinstance(node, FusedMixOrderReductions) or MixOrderReduction.is_contiguous_node(node):
        return []
    return sums_elsewhere(node)


def sums_elsewhere(node: Any) -> list[str]:
    """The names of buffers that a scheduler node's reductions write inside other buffers, as in a concatenation."""
    from torch._inductor.ir import FixedLayout, FlexibleLayout

    return [
        buffer.get_name()
        for reduction in node.get_nodes()
        if reduction.is_reduction()
        for buffer in _written(reduction)
        if type(buffer.layout) not in (FixedLayout, FlexibleLayout)
    ]


def _written(reduction: Any) -> Iterator[Any]:
    """The output buffers of a reduction; for a split reduction, those of its second step."""
    for output in reduction.get_outputs():
        if getattr(reduction.node, "_split_size", None):
            yield from (second.node for second in output.users[0].node.get_outputs())
        else:
            yield output.node


Matched = Callable[[Any], None]
"""Called with a match for which only operators have been compared, not numbers."""


def is_attention(search: Any) -> bool:
    """Whether a search function of Inductor's pattern matcher belongs to `fuse_attention`."""
    return getattr(search, "__module__", "") == "torch._inductor.fx_passes.fuse_attention"


def ask_again(pattern: Any, active: Callable[[], bool], matched: Matched) -> None:
    """Makes Inductor trace a pattern again with the shapes of a match, and compare it in full, while `active()` is
    true.

    Inductor does so if it has no precompiled pattern, which it decides by the pattern's truth value.

    Args:
        pattern: a precompiled pattern from a file of PyTorch.
        active: whether to do so now.
        matched: called with each match.
    """
    plain = type(pattern)

    def truth(self: Any) -> bool:
        return not active()

    def match(self: Any, node: Any) -> Any:
        found = plain.match(self, node)
        if found:  # a match is true, and a failure is not
            matched(found)
        return found

    pattern.__class__ = type(plain.__name__, (plain,), {"__bool__": truth, "match": match})


def registered_attention() -> Iterator[Any]:
    """The precompiled attention patterns that Inductor has loaded so far."""
    from torch._inductor.pattern_matcher import PatternExpr

    folder = "torch._inductor.fx_passes.serialized_patterns._sfdp_pattern_"
    for module in [module for name, module in sys.modules.copy().items() if name.startswith(folder)]:
        for name, value in vars(module).items():
            if name.startswith("_sfdp_pattern_") and isinstance(value, PatternExpr):
                yield value
