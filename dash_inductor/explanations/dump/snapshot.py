"""What a dump shows of a graph: a `Snapshot` of its nodes, and neighbourhoods of nodes."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.fx import Graph, Node

from ...graph.arguments import name_of
from ...graph.nodes import op_name

Kind = Literal["input", "attention", "ours", "other"]

UP, DOWN, MOST = 6, 2, 36
"""The extent of a neighbourhood: steps towards the inputs, steps towards the outputs, and the maximum of nodes."""


@dataclass(frozen=True)
class Item:
    """A node of an FX graph as a dump shows it.

    Args:
        name: the name of the node.
        label: the operator or, for an input, the model's name for it.
        note: the dtype and shape of the node's value; "" if it has none.
        line: the whole node, as printed by FX.
        kind: the kind of node, which selects its colour.
        inputs: the names of the nodes that it reads.
        site: the name of the site if the node calls an operator of dash_inductor; else "".
    """

    name: str
    label: str
    note: str
    line: str
    kind: Kind
    inputs: tuple[str, ...]
    site: str = ""


@dataclass(frozen=True)
class Snapshot:
    """The nodes of a graph by name, in order, without the output and `getitem` nodes."""

    items: dict[str, Item]

    @staticmethod
    def of(graph: Graph) -> Snapshot:
        """Returns a snapshot of an FX graph, which later changes of the graph do not affect."""
        return Snapshot({node.name: _item(node) for node in graph.nodes if node.op != "output" and not _is_part(node)})

    def of_site(self, name: str) -> list[str]:
        """Returns the names of the nodes of a site.

        These nodes call dash_inductor's operators for the site; if there are none, it is the node with the site's name.
        """
        ours = [item.name for item in self.items.values() if item.site == name]
        return ours or ([name] if name in self.items else [])

    def around(self, centres: Iterable[str]) -> Snapshot:
        """Returns the part of the snapshot around some nodes: the nearest nodes, at most `MOST`."""
        readers: dict[str, list[str]] = {}
        for item in self.items.values():
            for name in item.inputs:
                readers.setdefault(name, []).append(item.name)
        kept: dict[str, None] = {}
        queue = deque((name, UP, DOWN) for name in centres)
        while queue and len(kept) < MOST:
            name, up, down = queue.popleft()
            if name in kept:
                continue
            kept[name] = None
            item = self.items[name]
            if down:  # readers first, because there are few
                queue.extend((reader, 0, down - 1) for reader in readers.get(name, ()))
            if up:
                queue.extend((source, up - 1, 0) for source in item.inputs)
        return Snapshot({name: item for name, item in self.items.items() if name in kept})


def _is_part(node: Node) -> bool:
    return node.target is operator.getitem


def _item(node: Node) -> Item:
    whole = [_whole(source) for source in node.all_input_nodes]
    return Item(
        name=node.name,
        label=_label(node),
        note=_note(node),
        line=node.format_node() or node.name,
        kind=_kind(node),
        inputs=tuple(dict.fromkeys(source.name for source in whole)),
        site=_site(node) if _kind(node) == "ours" else "",
    )


def _site(node: Node) -> str:
    """The site's name of our operator, from its last text argument (name and module); "" if there is none."""
    texts = [argument for argument in node.args if isinstance(argument, str)]
    return texts[-1].partition(" in ")[0] if texts else ""


def _whole(node: Node) -> Node:
    while _is_part(node):
        node = node.args[0]  # type: ignore[assignment]  # what a part is taken from
    return node


def _kind(node: Node) -> Kind:
    if node.op in ("placeholder", "get_attr"):
        return "input"
    name = op_name(node)
    if name.startswith("dash_inductor::"):
        return "ours"
    return "attention" if "attention" in name or "attn" in name else "other"


def _label(node: Node) -> str:
    if node.op == "placeholder":
        return name_of(node)
    if node.op != "call_function":
        return str(node.target)
    name = op_name(node)
    if not name:
        return getattr(node.target, "__name__", node.name)
    return name.removeprefix("aten::").removeprefix("prims::").removeprefix("_scaled_dot_product_")


def _note(node: Node) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    tensors = [x for x in values if isinstance(x, Tensor)]
    if not tensors:
        return ""
    shape = "x".join(map(str, tensors[0].shape)) or "scalar"
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{str(tensors[0].dtype).removeprefix('torch.')} {shape}{more}"
