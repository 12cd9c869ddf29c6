"""Products of groups: what they leave unwritten is filled, so that their graphs need no fill of everything.

`aten::_grouped_mm` writes nothing behind its last offset, and Inductor leaves it to PyTorch.  A graph that holds it
would keep the fill of uninitialized memory (`install.fill`), which writes all results of all operators twice.  Here the
operator becomes `dash_inductor::grouped_mm`, which fills what has been left out: nothing at all in layers of experts
that send every token somewhere.  Where a program lets Inductor time products, their own kernels stay its choice.
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
class GroupedProductsRewrite:
    """Products of groups on any device; their values are what they were, so there are no records."""

    name: ClassVar[str] = "grouped_products"

    def is_on(self, config: Config) -> bool:
        return config.rewrites == "all" and config.fill == "off"

    def apply(self, graph: Graph) -> Sequence[Result]:
        if not compat.times_products():
            for node in graph.find_nodes(op="call_function", target=PLAIN):
                _rewrite(node)
        return []

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """A graph that no pass sees keeps the fill."""
        return []


def _rewrite(node: Node) -> None:
    ours = Emitter(node.graph).call(grouped_mm, node.args, dict(node.kwargs), before=node, like=node)
    stand_for(ours, node)
    node.replace_all_uses_with(ours)
    node.graph.erase_node(node)
