"""Detects attention in any formulation as two products with a normalisation between them.

Elementwise operators, views and reductions over one dimension lead from a first product to a tensor that is normalised
(see `planes`) along a dimension of the product; a second product contracts that dimension.

By this definition, the following are not attention: a softmax whose dimension no product contracts (classes, losses),
weights that multiply other tensors for each row (a router of experts), layer norms, and products with positions that
the graph itself computes, such as a soft argmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from torch.fx import Graph, Node

from ...graph import backward
from ...model.plan import Fallback
from ...model.reasons import Reason
from ..attention import Refusal
from .dimensions import Label, labels_of
from .planes import Plane, Planes
from .products import Product
from .words import Way

OP = "attention by hand"


def find(graph: Graph, known: Set[Node]) -> Iterator[Refusal]:
    """Yield a refusal for each attention of a graph that no frontend has found.

    Args:
        graph: the graph.
        known: the nodes of the attentions that frontends have found.
    """
    of_backward = backward.of_backward(graph)
    planes, found = Planes(), set[Node]()
    for node in graph.nodes:
        if node in of_backward or node.op != "call_function":
            continue
        planes.read(node)
        for way in _ways(planes, node):
            nodes = {*way.before, *way.after, way.normaliser, way.second}
            if nodes.isdisjoint(known) and found.isdisjoint({way.normaliser, way.second}):
                yield _refusal(way, of_backward)
            found |= {way.normaliser, way.second}


def _ways(planes: Planes, node: Node) -> Iterator[Way]:
    """Yield the attentions whose last node is `node`."""
    product = planes.products.get(node)
    if product is not None:
        for side, operand in enumerate(product.operands):
            plane = planes.of.get(operand)
            if plane is not None and product.operands[1 - side] not in planes.constants:
                for label in _contracted(plane, product, side):
                    yield _way(planes, operand, label, plane.normal[label], node)
                    return
    for label in planes.divided.get(node, ()):
        second = next(
            first for first, _ in planes.of[node].labels if label in planes.contracted.get(first, ())
        )  # fmt: skip
        yield _way(planes, second, label, node, second)
        return


def _contracted(plane: Plane, product: Product, side: int) -> Iterator[Label]:
    """Yield the labels along which a plane is normalised and that a product contracts, except those of a router.

    A router's weights multiply values that each of its rows has for itself: its rows are a batch of the second product.
    """
    if not plane.normal:
        return

    def labels(pairs: list[tuple[int | None, int | None]]) -> frozenset[Label]:
        return labels_of([plane.dims[dim] for pair in pairs if (dim := pair[side]) is not None])

    batch = labels([pair for pair in product.kept if None not in pair])
    free = labels([pair for pair in product.kept if pair[1 - side] is None])
    summed = labels([pair for pair in product.contracted if None not in pair])
    for label in sorted(
        summed & plane.normal.keys(), key=lambda label: (label[0], label[1]), reverse=True
    ):  # the latest product first
        rows = [other for other in batch | free if other[0] is label[0] and other[1] != label[1]]
        if not any(row in batch for row in rows) or any(row in free for row in rows):
            yield label


def _way(planes: Planes, start: Node, label: Label, normaliser: Node, second: Node) -> Way:
    """Return the nodes between the two products: nodes after the first whose plane has the label."""
    seen, left = set[Node](), [*start.all_input_nodes] if start is second else [start]
    left += [normaliser] if start is second else []
    while left:
        node = left.pop()
        plane = planes.of.get(node)
        if node in seen or node is label[0] or plane is None or (label not in plane.labels and label not in plane.sums):
            continue
        seen.add(node)
        left += node.all_input_nodes
    seen -= {normaliser, second}
    nodes = sorted(seen)
    before = [node for node in nodes if node < normaliser]
    after = [node for node in nodes if normaliser < node]
    products = frozenset(node for node in nodes if node in planes.products)
    return Way(before, normaliser, after, second, products)


def _refusal(way: Way, of_backward: Set[Node]) -> Refusal:
    has_backward = backward.has_backward([*way.before, way.normaliser, *way.after, way.second], of_backward)
    fallback = Fallback(Reason.UNSUPPORTED_OP, way.in_words())
    return Refusal(way.normaliser, OP, fallback, has_backward, None, place=way.second)
