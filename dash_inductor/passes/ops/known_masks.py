"""Removes `torch.where` if the graph proves that its mask is true everywhere or false everywhere.

Mixture-of-experts layers zero the rows of tokens that go to no local expert, by comparing the sorted expert ids with
the number of local experts.  If all experts are local, the graph proves that every id is smaller, because `topk` chose
it among that many positions.  `torch.where` with such a mask is replaced by the operand that it always selects, which
saves a read and a write of the rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...config import Config
from ...graph import sizes
from ...graph.emit import erase_dead
from ...graph.model_line import model_line
from ...graph.nodes import bind, is_joint, is_tangent, op_name
from ...graph.views import base
from ...records.records import Record
from ..base.rewrite import Result
from .integer_rules import integer_of
from .uniqueness import values_of

WHERE = torch.ops.aten.where.self
DEVICES = ("cuda",)
"""The device types on which masks are examined."""

_COMPARED: Mapping[str, Callable[[Any, Any], Any]] = {
    "aten::ge": operator.ge, "aten::gt": operator.gt, "aten::le": operator.le, "aten::lt": operator.lt,
}  # fmt: skip


@dataclass(frozen=True)
class KnownMasksRewrite:
    """The pass that removes `torch.where` on CUDA if its mask is proved to be true or false everywhere.

    Only masks that compare a tensor of integers with a number are examined.
    """

    name: ClassVar[str] = "known_masks"

    def is_on(self, config: Config) -> bool:
        return self.name in config.rewrites

    def apply(self, graph: Graph) -> Sequence[Result]:
        results, masks = [], dict[Node, bool | None]()
        for node in graph.find_nodes(op="call_function", target=WHERE):
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or value.device.type not in DEVICES:
                continue
            mask = base(node.args[0])
            if mask not in masks:
                masks[mask] = outcome(mask)
            known = masks[mask]
            chosen = None if known is None else node.args[1 if known else 2]
            if isinstance(chosen, Node) and _can_stand_for(chosen, node):
                results.append(Result(_replaced(node, mask, chosen, bool(known))))
        return results

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns no fallback records: without this pass, the mask is computed and applied, with the same results."""
        return []


def outcome(mask: Node) -> bool | None:
    """Returns True or False if a mask is proved to have this value everywhere; else None.

    Args:
        mask: the mask's node; only comparisons of integers with a number are examined.
    """
    compare = _COMPARED.get(op_name(mask))
    if compare is None:
        return None
    args = bind(mask)
    number = integer_of(args["self"].meta["val"].dtype, args["other"])
    known = None if number is None else values_of(args["self"])
    if known is None:
        return None
    ends = compare(known.low, number), compare(known.high - 1, number)
    if all(map(statically_known_true, ends)):
        return True
    return False if all(statically_known_true(torch.sym_not(end)) for end in ends) else None


def _can_stand_for(chosen: Node, node: Node) -> bool:
    """Whether `chosen` can replace `node`: it has the same layout, its memory is not larger, and sharing it is
    invisible.

    The program could observe sharing through outputs of the graph, or by writing to an input before the backward.
    """
    have, want = chosen.meta.get("val"), node.meta["val"]
    if not isinstance(have, Tensor) or have.dtype != want.dtype or have.device != want.device:
        return False
    if not sizes.same_all(have.shape, want.shape) or not sizes.same_all(have.stride(), want.stride()):
        return False
    source = base(chosen)
    if not sizes.same(sizes.spanned(have), sizes.spanned(source.meta["val"])):
        return False
    shown = {base(result) for result in node.graph.output_node().all_input_nodes}
    if source.op == "call_function":
        return node not in shown or source not in shown
    return node not in shown and (is_tangent(source) or not is_joint(node.graph))


def _replaced(node: Node, mask: Node, chosen: Node, known: bool) -> Record:
    line, module = model_line([node, *node.users])
    name, op, value = node.name, op_name(node), node.meta["val"]
    values = values_of(bind(mask)["self"])
    assert values is not None
    facts: dict[str, object] = {
        "shape": [sizes.static(size) for size in value.shape],
        "dtype": str(value.dtype).removeprefix("torch."),
        "low": sizes.static(values.low),
        "high": sizes.static(values.high),
        "number": bind(mask)["other"],
    }
    node.replace_all_uses_with(chosen)
    erase_dead(node.graph, [node])
    return Record(
        rewrite=KnownMasksRewrite.name,
        name=name,
        op=op,
        status="replaced",
        reason=None,
        detail=f"its mask is {'true' if known else 'false'} everywhere: what it chooses is read as it is",
        line=line,
        module=module,
        facts=facts,
    )
