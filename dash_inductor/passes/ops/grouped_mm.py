"""Replaces `aten::_grouped_mm` by an operator that also fills the part of the result that ATen leaves unwritten.

`aten::_grouped_mm` does not write the rows after its last offset, and Inductor calls ATen for it.  A graph with this
operator would have to keep PyTorch's fill (`install.fill_uninitialized_memory`), which writes the results of all
operators twice.  This pass replaces it by `dash_inductor::grouped_mm`, which fills only the unwritten rows; there are
none in mixture-of-experts layers that route every token.  If the program lets Inductor autotune matmuls, the operator
is not replaced, because Inductor may choose its own kernel for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, Node

from ...config import Config
from ...graph.emit import Emitter
from ...upstream import compat
from ...upstream.partitioner import stand_for
from ..base.rewrite import Result
from .operators.grouped_mm import PLAIN, grouped_mm


@dataclass(frozen=True)
class GroupedMmRewrite:
    """The pass that replaces `aten::_grouped_mm` by `dash_inductor::grouped_mm`, on any device.

    It makes no records, because the values that ATen computes do not change.
    """

    name: ClassVar[str] = "grouped_mm"

    def is_on(self, config: Config) -> bool:
        return self.name in config.rewrites and not config.fill_uninitialized_memory

    def apply(self, graph: Graph) -> Sequence[Result]:
        if not compat.times_products():
            for node in graph.find_nodes(op="call_function", target=PLAIN):
                _rewrite(node)
        return []

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns no fallback records: without this pass, PyTorch fills the whole result, which only takes longer."""
        return []


def _rewrite(node: Node) -> None:
    ours = Emitter(node.graph).call(grouped_mm, node.args, dict(node.kwargs), before=node, like=node)
    stand_for(ours, node)
    node.replace_all_uses_with(ours)
    node.graph.erase_node(node)
