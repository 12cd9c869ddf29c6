"""Scatters in graphs: nodes that write values at a tensor of indices, whichever operator they are.

`scatters` reads `index_put`, `scatter` and `scatter_add` into one description, `Scatter`, and `replaced` puts other
nodes in the place of one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...errors import described
from ...graph import sizes
from ...graph.emit import Emitter, erase_dead
from ...graph.model_line import model_line
from ...graph.nodes import bind, op_name
from ...records.records import Record
from ...upstream import arch

log = logging.getLogger("dash_inductor")
aten = torch.ops.aten

DEVICES = ("cuda",)
"""Types of devices whose scatters are rewritten."""

NUMBERS = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
})  # fmt: skip
"""Dtypes that what replaces an operator moves, adds and sorts as ATen does.  Booleans are only moved: their sum in ATen
is true where any of them is, and a kernel that adds bits would count modulo two."""

_ROWS = ("aten::index_put", "aten::_unsafe_index_put")
_ELEMENTS = {
    "aten::scatter_add": True,
    "aten::scatter": False,
    "torchtitan::deterministic_scatter_add": True,
}
"""Operators that scatter each value by an index of its own, and whether they add."""
SAME = frozenset(
    f"aten::{name}"
    for name in (
        *("alias", "clone", "contiguous", "detach", "lift_fresh_copy", "_to_copy"),
        *("view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "flatten"),
    )
) | {"prims::convert_element_type", "prims::device_put"}
"""Operators whose results hold the numbers of their first argument in the order of rows."""
_KEPT = "dash_inductor_kept"  # in the metadata of a scatter that an error has kept: the pass may see a graph again


@dataclass(frozen=True)
class Scatter:
    """A node that writes values at indices, into a copy of a tensor.

    Attributes:
        node: the scatter itself; its result has the shape of `base`.
        base: the tensor whose copy is written to.
        dim: the dimension along which the indices count.
        indices: the node of the indices.  If `by_rows`, its numbers in the order of rows are those of slices of base
            along `dim`; else it has the dimensions of base, and each number is that of one element.
        values: the node of the values, or one number for all.  If `by_rows`, it broadcasts to `indices` in the place
            of `dim`; else it begins with what has the shape of `indices`, as the result does.
        adds: whether values are added to what is there; else they take its place.
        wraps: whether negative indices count from the end; else they are errors.
        lines: if not None, the dimension in front of `dim` whose element number i has the numbers indices[i], of the
            slices of that element.
    """

    node: Node
    base: Node
    dim: int
    indices: Node
    values: Node | float
    adds: bool
    by_rows: bool
    wraps: bool
    lines: int | None = None

    @property
    def fills_lines(self) -> bool:
        """Whether each line along `dim` has indices: certainly, or for the tensors at hand, by a guard."""
        if self.by_rows:
            return True
        pairs = enumerate(zip(self.indices.meta["val"].shape, self.shape, strict=True))
        return all(sizes.made_same(of, size) for dim, (of, size) in pairs if dim != self.dim)

    @property
    def shape(self) -> torch.Size:
        value: Tensor = self.base.meta["val"]
        return value.shape


def scatters(graph: Graph) -> Iterator[Scatter]:
    """Yields the scatters of a graph in its order, on the devices in `DEVICES`; the graph may be changed meanwhile."""
    for node in graph.nodes:
        scatter = scatter_of(node) if node.op == "call_function" else None
        if scatter is not None:
            yield scatter


def scatter_of(node: Node) -> Scatter | None:
    """Returns the description of a scatter; None for another node, and for a scatter that this module does not read."""
    name = op_name(node)
    if not (name in _ROWS or name in _ELEMENTS) or _KEPT in node.meta or node.kwargs.get("reduce") is not None:
        return None
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() == 0 or value.dtype not in NUMBERS | {torch.bool}:
        return None
    if value.device.type not in DEVICES or not arch.is_supported(value.device):
        return None
    scatter = _of_rows(node, name) if name in _ROWS else _of_elements(node, name, value)
    return scatter if scatter is None or not scatter.adds or value.dtype in NUMBERS else None


def _of_rows(node: Node, name: str) -> Scatter | None:
    args = bind(node)
    base, values, given = args["self"], args["values"], list(args["indices"])
    places = [dim for dim, index in enumerate(given) if index is not None]
    if not places or any(not _is_integer(given[dim]) for dim in places):
        return None
    lines = None
    if len(places) == 2 and places[1] == places[0] + 1 and _counts(given[places[0]], given[places[1]], base, places[0]):
        lines = places[0]
    elif len(places) != 1:
        return None
    dim, wraps = places[-1], name == "aten::index_put"
    if values.meta["val"].dtype != base.meta["val"].dtype:
        return None
    return Scatter(node, base, dim, given[dim], values, bool(args["accumulate"]), True, wraps, lines)


def _of_elements(node: Node, name: str, value: Tensor) -> Scatter | None:
    args: dict[str, Any] = bind(node)
    if name.startswith("torchtitan::"):
        args = {"self": args["out"], "index": args["index"], "src": args["src"], "dim": 0}
    values = args["src"] if "src" in args else args["value"]
    indices, dim = args["index"], args["dim"] % value.dim()
    if not _is_integer(indices) or indices.meta["val"].dim() != value.dim():
        return None
    if isinstance(values, Node) and values.meta["val"].dtype != value.dtype:
        return None
    return Scatter(node, args["self"], dim, indices, values, _ELEMENTS[name], False, False)


def _is_integer(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)


def _counts(first: Node, second: Node, base: Node, dim: int) -> bool:
    """Whether one index is 0, 1, 2 and so on, the number of each element of a tensor along a dimension, and the other
    has one or several numbers for each.
    """
    shape, n = first.meta["val"].shape, base.meta["val"].shape[dim]
    of = second.meta["val"].shape
    if not shape or len(of) != len(shape) or any(sizes.static(size) != 1 for size in shape[1:]):
        return False
    return sizes.same(shape[0], n) and sizes.same(of[0], n) and is_iota(first)


def is_iota(node: Node) -> bool:
    """Whether a node, in the order of rows, is 0, 1, 2 and so on."""
    node = source(node)
    name, args = op_name(node), node.args
    if not _is_integer(node) or not (node.meta["val"].dtype == torch.int64 or _holds_places(node)):
        return False
    if name == "prims::iota":
        return bool(node.kwargs.get("start") == 0 and node.kwargs.get("step") == 1)
    if name == "aten::arange" and str(node.target) != "aten.arange.default":
        named = bind(node)
        return bool(named["start"] == 0 and named.get("step", 1) == 1)
    return name == "aten::arange" and len(args) == 1


def source(node: Node) -> Node:
    """The node that has the integers of this one in the order of rows, behind views, copies and conversions.

    A conversion to a type that cannot hold the places of all elements ends the way.
    """
    while op_name(node) in SAME:
        before = node.args[0]
        assert isinstance(before, Node)
        narrows = before.meta["val"].dtype == torch.int64 and node.meta["val"].dtype == torch.int32
        if (
            reads_bits(node)
            or not _is_integer(before)
            or not _is_integer(node)
            or (narrows and not _holds_places(node))
        ):
            break
        node = before
    return node


def reads_bits(node: Node) -> bool:
    """Whether a node shows the bits of a tensor as numbers of another type."""
    return node.target is aten.view.dtype


def _holds_places(node: Node) -> bool:
    return statically_known_true(node.meta["val"].numel() < 1 << 31)


def constant(node: Node) -> float | None:
    """The number of which a tensor is full; None where it is not certainly full of one."""
    while op_name(node) in (*SAME, "aten::expand", "aten::permute"):
        before = node.args[0]
        assert isinstance(before, Node)
        if reads_bits(node) or op_name(node) in ("aten::_to_copy", "prims::convert_element_type"):
            return None
        node = before
    name = op_name(node)
    if name in ("aten::zeros", "aten::zeros_like", "aten::new_zeros"):
        return 0
    if name in ("aten::full", "aten::full_like", "aten::new_full"):
        number = bind(node)["fill_value"]
        return number if isinstance(number, (int, float)) else None
    return None


def cut(values: Tensor, shape: Sequence[Any]) -> Tensor:
    """The first elements of values along each dimension, as many as a shape has."""
    for dim, size in enumerate(shape):
        if not sizes.same(values.shape[dim], size):
            values = values.narrow(dim, 0, size)
    return values


def replaced(
    scatter: Scatter,
    rewrite: str,
    detail: str,
    facts: dict[str, object],
    function: Callable[..., Tensor],
    tensors: tuple[Node, ...],
) -> Record:
    """Put ``function(*tensors)`` in the place of a scatter; returns the record of it, or of the error that kept it.

    The function takes the sizes that it needs from its arguments.  The result has the layout of the scatter's.
    """
    node, value = scatter.node, scatter.node.meta["val"]
    line, module = model_line([node, *node.users])
    facts = {
        "shape": [sizes.static(size) for size in value.shape],
        "indices": [sizes.static(size) for size in scatter.indices.meta["val"].shape],
        "dim": scatter.dim,
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": str(value.device),
    } | facts
    name, op = node.name, op_name(node)
    error = _put(node, function, tensors)
    return Record.of_attempt(
        error,
        rewrite=rewrite,
        name=name,
        op=op,
        detail=detail,
        line=line,
        module=module,
        facts=facts,
    )


def _put(node: Node, function: Callable[..., Tensor], tensors: tuple[Node, ...]) -> str:
    emitter = Emitter(node.graph)
    try:
        result = emitter.inline(function, tensors, before=node, like=node)
        have, want = result.meta["val"], node.meta["val"]
        if have.dtype != want.dtype or not sizes.same_all(have.shape, want.shape):
            raise ValueError(f"{have.dtype} {list(have.shape)} in the place of {want.dtype} {list(want.shape)}")
        if not sizes.same_all(have.stride(), want.stride()):
            if want.is_contiguous() or sizes.dense_order(want.shape, want.stride()) is None:
                kwargs = {"memory_format": torch.contiguous_format}
                result = emitter.call(aten.clone.default, (result,), kwargs, before=node, like=node)
            else:
                result = emitter.copied(result, before=node, like=node)
            if not sizes.same_all(result.meta["val"].stride(), want.stride()):
                raise ValueError(f"strides {list(have.stride())} in the place of {list(want.stride())}")
    except Exception as error:
        log.debug("%s", node, exc_info=error)
        emitter.discard()
        node.meta[_KEPT] = True
        return described(error)
    node.replace_all_uses_with(result)
    erase_dead(node.graph, [node])
    return ""
