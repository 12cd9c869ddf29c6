"""Silent errors of PyTorch's compiler, by version, and the parts of it in which they are.

One table, for three readers: `install.defects`, and `install.barriers` for one of them, keep compiles out of the faulty
parts, records name the defect that a graph would have met, and the doctor prints what applies to the installed version.
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
        name: in records.
        versions: minor versions of PyTorch that have it, the first and the last, of those that are supported.
        reports: numbers of PyTorch's reports.
        what: what goes wrong, a sentence.
        remedy: what dash_inductor does about it, under deterministic algorithms.
    """

    name: str
    versions: tuple[tuple[int, int], tuple[int, int]]
    reports: tuple[int, ...]
    what: str
    remedy: str

    @property
    def applies(self) -> bool:
        """Whether the installed PyTorch has it."""
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
    """The buffers whose values `MIXED_ORDER` would lose if Inductor fused two nodes of its scheduler.

    The code that is generated for the sums along columns binds a new tensor to the name of their buffer.  A buffer with
    a layout of its own becomes that tensor; one that lies in another buffer, as what is concatenated does, is lost.
    """
    from torch._inductor.scheduler import MixOrderReduction

    return sums_elsewhere(node2 if MixOrderReduction.is_contiguous_node(node1) else node1)


def sums_along_columns_elsewhere(node: Any) -> list[str]:
    """As `lost_sums`, for a node that is fused into others that are fused already."""
    from torch._inductor.scheduler import FusedMixOrderReductions, MixOrderReduction

    if isinstance(node, FusedMixOrderReductions) or MixOrderReduction.is_contiguous_node(node):
        return []
    return sums_elsewhere(node)


def sums_elsewhere(node: Any) -> list[str]:
    """The names of buffers that reductions of a scheduler's node write and that lie in other buffers."""
    from torch._inductor.ir import FixedLayout, FlexibleLayout

    return [
        buffer.get_name()
        for reduction in node.get_nodes()
        if reduction.is_reduction()
        for buffer in _written(reduction)
        if type(buffer.layout) not in (FixedLayout, FlexibleLayout)
    ]


def _written(reduction: Any) -> Iterator[Any]:
    """The buffers of a reduction, or of the second step of one that Inductor has split."""
    for output in reduction.get_outputs():
        if getattr(reduction.node, "_split_size", None):
            yield from (second.node for second in output.users[0].node.get_outputs())
        else:
            yield output.node


Matched = Callable[[Any], None]
"""Gets a match of which only operators, not their numbers, have been compared."""


def is_attention(search: Any) -> bool:
    """Whether a function that Inductor searches for is one of `fuse_attention`."""
    return getattr(search, "__module__", "") == "torch._inductor.fx_passes.fuse_attention"


def ask_again(pattern: Any, active: Callable[[], bool], matched: Matched) -> None:
    """Let Inductor trace what it searches for again, with the shapes of a match, while `active`.

    It does so wherever it has no pattern that was traced before, and asks for that by its truth.

    Args:
        pattern: one that was traced before, as a file of PyTorch's has it.
        matched: is told of each match.
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
    """The patterns of attention that Inductor has loaded from its files so far."""
    from torch._inductor.pattern_matcher import PatternExpr

    folder = "torch._inductor.fx_passes.serialized_patterns._sfdp_pattern_"
    for module in [module for name, module in sys.modules.items() if name.startswith(folder)]:
        for name, value in vars(module).items():
            if name.startswith("_sfdp_pattern_") and isinstance(value, PatternExpr):
                yield value
