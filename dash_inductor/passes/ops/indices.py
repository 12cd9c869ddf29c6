"""Describes scatters: graph nodes that write values at a tensor of indices, whichever operator they use.

`scatters` converts `index_put`, `scatter` and `scatter_add` to one description, `Scatter`.  `replaced` replaces a
scatter in the graph.
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
"""The device types on which scatters are rewritten."""

NUMBERS = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
})  # fmt: skip
"""The dtypes for which replacements move, add and sort as ATen does.  Booleans are only moved: ATen's sum of booleans
is their disjunction, while a kernel that adds bits would count modulo two."""

_ROWS = ("aten::index_put", "aten::_unsafe_index_put")
_ELEMENTS = {
    "aten::scatter_add": True,
    "aten::scatter": False,
    "torchtitan::deterministic_scatter_add": True,
}
"""Operators with one index per value, and whether they add."""
SAME = frozenset(
    f"aten::{name}"
    for name in (
        *("alias", "clone", "contiguous", "detach", "lift_fresh_copy", "_to_copy"),
        *("view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "flatten"),
    )
) | {"prims::convert_element_type", "prims::device_put"}
"""Operators whose results contain the elements of their first argument in row-major order."""
_FALLBACK = "dash_inductor_fallback"  # in node.meta of a scatter that was not replaced after an error


@dataclass(frozen=True)
class Scatter:
    """A node that writes values at indices into a copy of a tensor.

    Attributes:
        node: the scatter; its result has the shape of `base`.
        base: the tensor whose copy is written to.
        dim: the dimension along which indices count.
        indices: the node of the indices.  If `by_rows`, its elements in row-major order are indices of slices of base
            along `dim`; else it has the dimensions of base, and each element is the index of one element.
        values: the node of the values, or one number for all.  If `by_rows`, its shape is that of base with the shape
            of `indices` in place of `dim`, or broadcasts to that; else only its first elements along each dimension,
            as many as `indices` has, are used.
        adds: whether values are added to the previous ones; else they replace them.
        by_rows: whether indices select whole slices.
        wraps: whether negative indices count from the end; else they are errors.
        lines: None if all indices apply to the whole of base; else the dimension before `dim`, and ``indices[i]`` are
            the indices along `dim` for element i of that dimension.
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
        """Whether every 1-D slice of the base along `dim` has indices.

        If this depends on a dynamic size and holds for the example inputs, a guard is added that ensures it.
        """
        if self.by_rows:
            return True
        pairs = enumerate(zip(self.indices.meta["val"].shape, self.shape, strict=True))
        return all(sizes.made_same(of, size) for dim, (of, size) in pairs if dim != self.dim)

    @property
    def shape(self) -> torch.Size:
        value: Tensor = self.base.meta["val"]
        return value.shape


def scatters(graph: Graph) -> Iterator[Scatter]:
    """Yields the scatters in a graph that run on `DEVICES`, in graph order.

    The caller may replace each scatter before it asks for the next one.
    """
    for node in graph.nodes:
        scatter = scatter_of(node) if node.op == "call_function" else None
        if scatter is not None:
            yield scatter


def scatter_of(node: Node) -> Scatter | None:
    """Returns the `Scatter` that describes a node; None for nodes that are not scatters, and unsupported scatters."""
    name = op_name(node)
    if not (name in _ROWS or name in _ELEMENTS) or _FALLBACK in node.meta or node.kwargs.get("reduce") is not None:
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
    """Whether `first` is an iota over a dimension of `base`, for each element of which `second` has indices."""
    shape, n = first.meta["val"].shape, base.meta["val"].shape[dim]
    of = second.meta["val"].shape
    if not shape or len(of) != len(shape) or any(sizes.static(size) != 1 for size in shape[1:]):
        return False
    return sizes.same(shape[0], n) and sizes.same(of[0], n) and is_iota(first)


def is_iota(node: Node) -> bool:
    """Returns whether the elements of a node's tensor, in row-major order, are known to be 0, 1, 2, ..."""
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
    """Follows views, copies and conversions back to the node that first holds the integers of `node`, and returns it.

    Both nodes hold the same integers in row-major order.  Conversions to a dtype that cannot represent the positions of
    all elements are not followed.
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
    """Returns whether a node reinterprets the bits of a tensor as another dtype (``view(dtype)``)."""
    return node.target is aten.view.dtype


def _holds_places(node: Node) -> bool:
    return statically_known_true(node.meta["val"].numel() < 1 << 31)


def constant(node: Node) -> float | None:
    """Returns the number to which all elements of a node's tensor are equal; None if that is not known."""
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
    """Narrows a tensor to `shape`, keeping its first elements along each dimension."""
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
    """Replaces a scatter in its graph by ``function(*tensors)``, and returns its record.

    The result gets the layout of the scatter's result.  If the function raises, the scatter stays in the graph, and the
    record contains the error.

    Args:
        scatter: the scatter.
        rewrite: the name of the pass.
        detail: what runs instead, in words, for the record.
        facts: further entries of the record.
        function: computes the replacement; it is traced, and takes all sizes from its arguments.
        tensors: the nodes of its arguments.
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
        node.meta[_FALLBACK] = True
        return described(error)
    node.replace_all_uses_with(result)
    erase_dead(node.graph, [node])
    return ""
