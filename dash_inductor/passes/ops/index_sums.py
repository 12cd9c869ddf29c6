"""Replaces sums by index (segment sums) on CUDA: one sort per index, and sums of sorted segments in fixed order.

`index_add`, `scatter_add`, `scatter_reduce`, and the backwards of `x[index]`, `index_select`, `gather` and embeddings
of small tables add the rows of a tensor that have the same index.  Nondeterministic kernels use atomics.  Under
deterministic algorithms Inductor calls kernels that sort 64-bit indices in each call, and add the rows of an index one
after another.

Here an index is converted to keys of 8, 16 or 32 bits, depending on the number of rows.  One stable sort serves all
sums of the graph that read the index, and `dash_inductor::index_sums` adds the segments (`kernels.sums`).  For few
rows, as for biases of experts, nothing is sorted: `dash_inductor::few_sums` multiplies by the one-hot matrix of keys.
An index out of bounds triggers a device-side assertion, as in PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...config import Config
from ...errors import described
from ...graph import sizes
from ...graph.emit import Emitter, erase_dead
from ...graph.model_line import model_line
from ...graph.nodes import bind
from ...model.site import NOMINAL_BATCH, NOMINAL_LEN
from ...records.records import Record
from ...upstream import arch
from ..base.rewrite import Result
from .embeddings import FEW
from .operators.index_sums import MOST, index_sums
from .operators.one_hot_matmul_sum import few_sums

log = logging.getLogger("dash_inductor")
aten = torch.ops.aten

LEAST = 4096
"""The minimum number of elements of a sum that is rewritten; smaller ones are dominated by launch time."""
EMBEDDED_ROWS = 254
"""The maximum number of rows of an embedding table for this pass; for larger ones ATen's sorting kernel stays."""
ONE_HOT_ROWS = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 16}
"""The maximum number of rows for a sum by one-hot matmul, by dtype.  The matmul reads the values once, in order; a sort
with a walk takes about twice that time.  With 128 rows of 16-bit values, tensor cores need less time than the loads;
fp32 does not use them, and with 16 rows needs half the time of the loads.  Estimated from the rates of an H100."""
ONE_HOT_LEAST = 1 << 16
"""The minimum number of elements for a one-hot matmul; below, either way is dominated by launch time."""
NOMINAL = NOMINAL_LEN * NOMINAL_BATCH
"""The value that stands for dynamic sizes in these decisions."""
DEVICES = ("cuda",)
"""The device types on which sums are rewritten."""

_KEYS = ((torch.uint8, 2**8), (torch.int16, 2**15), (torch.int32, 2**31))
"""The dtypes of keys, each with the smallest number that does not fit."""
FAILED = "dash_inductor_index_sums"  # in node.meta of an operator that was not replaced after an error


Size = int | tuple[Node, int]
"""A size: a number or, if it is dynamic, a node and its dimension with this size."""


@dataclass(frozen=True)
class Index:
    """How the index tensors of a sum by index select the rows to which values are added.

    Attributes:
        tensors: the nodes of integer tensors, broadcast together: one for each row dimension, or a single one if
            `along` is set.
        lengths: the sizes of the row dimensions.
        wraps: whether negative indices count from the end.
        along: None, or the row dimension along which the single tensor selects, as `scatter` does; the position of an
            index in the tensor gives the other row dimensions.
        selected: the dimensions along which all elements of the single tensor are equal; only the first is read.
        flat: the number of the tensor's last dimensions that are flattened into one, for the last row dimension.
        left_out: the index in the first tensor whose values are skipped (padding); None if there is none.
    """

    tensors: tuple[Node, ...]
    lengths: tuple[Size, ...]
    wraps: bool = False
    along: int | None = None
    selected: tuple[int, ...] = ()
    flat: int = 1
    left_out: int | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that is equal for indices that select the same rows, whichever nodes provide their sizes."""
        lengths = [n if isinstance(n, int) else n[0].meta["val"].shape[n[1]].node.expr for n in self.lengths]
        return self.tensors, *lengths, self.wraps, self.along, self.selected, self.flat, self.left_out


@dataclass(frozen=True)
class Sum:
    """A sum by index, as `index_put`, `index_add` and `scatter_add` compute it: values with equal indices are added.

    Attributes:
        base: the tensor to which sums are added; None for zeros.
        values: the values, [batch dimensions of the result, dimensions of the index, columns of the result].
        index: how rows are selected.
        shape: the shape of the result.
        batch: the number of leading batch dimensions of the result.
        rows: the number of row dimensions after these; the remaining dimensions are columns.
        values_shape: the shape to which the values are broadcast; None if they have it.
        divisor: for a mean, what is added to the number of values to get the divisor of a sum: 1 if the base counts as
            a value, else 0; None if sums are not divided.
        is_gathered: whether the values are rows of another tensor that an index selects, so that their index dimension
            has another length (see `_gathered`).
        raises: whether PyTorch's operator has no deterministic kernel, so that even small sums are replaced.
    """

    base: Node | None
    values: Node
    index: Index
    shape: tuple[Size, ...]
    batch: int
    rows: int
    values_shape: tuple[int, ...] | None = None
    divisor: int | None = None
    is_gathered: bool = False
    raises: bool = False


@dataclass(frozen=True)
class IndexSumsRewrite:
    """The pass that replaces sums by index of floating-point tensors by deterministic segment sums, on CUDA."""

    name: ClassVar[str] = "index_sums"

    def is_on(self, config: Config) -> bool:
        return self.name in config.rewrites

    def apply(self, graph: Graph) -> Sequence[Result]:
        sorted_keys: dict[Any, tuple[Node, ...]] = {}
        results = []
        for node in list(graph.nodes):
            read = _READERS.get(node.target)
            if read is None or FAILED in node.meta or not adds_floats(node):
                continue
            found = read(node)
            if found is not None and pays(found) and (found.raises or is_sum(node)):
                results.append(Result(_rewritten(node, found, sorted_keys)))
        return results

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns no fallback records: without this pass, PyTorch's operators run.

        Most of these are deterministic; the others, such as backwards of pooling, raise an error by themselves.
        """
        return []


def is_ours(device: torch.device) -> bool:
    """Returns whether the pass `index_sums` replaces sums by index on this device."""
    return device.type in DEVICES and (device.type != "cuda" or arch.is_supported(device))


def adds_floats(node: Node) -> bool:
    """Returns whether a node's value is a tensor of floats, of at least 16 bits, on a device that `is_ours` accepts."""
    value = node.meta.get("val")
    return (
        isinstance(value, Tensor)
        and is_ours(value.device)
        and value.dtype.is_floating_point
        and value.dtype.itemsize > 1
    )


def is_sum(node: Node) -> bool:
    """Returns whether a node's value is contiguous and a tensor of floats for which `adds_floats` holds."""
    return adds_floats(node) and node.meta["val"].is_contiguous()


def pays(found: Sum) -> bool:
    """Returns whether a sum is large enough for a replacement to be faster, and fits into 32-bit indices.

    Sums that PyTorch cannot compute deterministically (`Sum.raises`) may be small.  Dynamic sizes count as `NOMINAL`.
    """
    values = _nominal(found.values.meta["val"].shape)
    rows = _nominal([size if isinstance(size, int) else None for size in found.index.lengths])
    return (values >= LEAST or found.raises) and max(rows, values) <= MOST


def takes_products(found: Sum) -> bool:
    """Returns whether a sum is computed by a one-hot matmul, not by a sort; depends only on its shapes and dtype."""
    value, lengths = found.values.meta["val"], found.index.lengths
    rows = math.prod(size if isinstance(size, int) else NOMINAL for size in lengths)
    is_large = _nominal(value.shape if found.values_shape is None else found.values_shape) >= ONE_HOT_LEAST
    return rows <= ONE_HOT_ROWS.get(value.dtype, 0) and is_large and found.divisor is None


def _nominal(shape: Sequence[sizes.Dim | None]) -> int:
    known = [None if size is None else sizes.static(size) for size in shape]
    return math.prod(NOMINAL if size is None else size for size in known)


def _is_zeros(node: Node) -> bool:
    if node.target is aten.full.default:
        return isinstance(node.args[1], (int, float)) and node.args[1] == 0
    return node.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def _sizes(node: Node) -> tuple[Size, ...]:
    """The sizes of a node's value."""
    known = map(sizes.static, node.meta["val"].shape)
    return tuple((node, dim) if size is None else size for dim, size in enumerate(known))


def read_put(node: Node) -> Sum | None:
    """Returns the `Sum` that an accumulating `index_put` computes; None if it is not one or is not supported.

    Its indices must be integers for adjacent dimensions.
    """
    args = bind(node)
    into, values = args["self"], args["values"]
    places = [dim for dim, index in enumerate(args["indices"]) if index is not None]
    if not args["accumulate"] or not places or places != [*range(places[0], places[-1] + 1)]:
        return None
    tensors = tuple(args["indices"][place] for place in places)
    if not {tensor.meta["val"].dtype for tensor in tensors} <= {torch.int32, torch.int64}:
        return None
    if values.meta["val"].dtype != into.meta["val"].dtype:
        return None
    shapes = [tensor.meta["val"].shape for tensor in tensors]
    are_static = all(sizes.static(size) is not None for shape in shapes for size in shape)
    if not are_static and not all(sizes.same_all(shapes[0], shape) for shape in shapes):
        return None
    whole, first, behind = into.meta["val"].shape, places[0], places[-1] + 1
    common = torch.broadcast_shapes(*shapes) if are_static else shapes[0]
    wanted, values_shape = [*whole[:first], *common, *whole[behind:]], None
    if not sizes.same_all(values.meta["val"].shape, wanted):
        values_shape = tuple(size for size in map(sizes.static, wanted) if size is not None)
        if len(values_shape) != len(wanted):
            return None
    shape = _sizes(into)
    index = Index(tensors, shape[first:behind], wraps=True)
    base = None if _is_zeros(into) else into
    return Sum(base, values, index, shape, first, len(places), values_shape)


def _add(node: Node) -> Sum | None:
    """Describes an `index_add`, which Inductor does not decompose for 16-bit elements; None if it is not supported."""
    args = bind(node)
    into, source, index = args["self"], args["source"], args["index"]
    if args["alpha"] != 1 or index.meta["val"].dim() != 1 or source.meta["val"].dtype != into.meta["val"].dtype:
        return None
    if not source.meta["val"].dim():
        return None
    shape, dim = _sizes(into), args["dim"] % source.meta["val"].dim()
    base = None if _is_zeros(into) else into
    # Negative indices wrap, as in Inductor's decomposition of the operator, so that both share keys.
    return Sum(base, source, Index((index,), shape[dim : dim + 1], wraps=True), shape, dim, 1)


def padding_of(args: Mapping[str, Any]) -> int | None:
    """Returns the index whose gradient an embedding's backward leaves out, from its arguments; None if there is none.

    PyTorch's operator takes any negative number as "none".
    """
    padding: int = args["padding_idx"]
    return padding if padding >= 0 else None


def _embedding(node: Node) -> Sum | None:
    """Describes the gradient of a small embedding table; None for other tables."""
    args = bind(node)
    rows, indices, gradient = args["num_weights"], args["indices"], args["grad_output"]
    if not isinstance(rows, int) or not FEW < rows <= EMBEDDED_ROWS or args["scale_grad_by_freq"]:
        return None
    index = Index((indices,), (rows,), left_out=padding_of(args))
    return Sum(None, gradient, index, (rows, _sizes(gradient)[-1]), 0, 1)


def _scatter(node: Node) -> Sum | None:
    """Describes a `scatter_add`, or a `scatter_reduce` by sum or mean; None if it is not supported.

    If the index is the same in all columns, whole rows are added.
    """
    args = bind(node)
    into, source = args["self"], args["src"]
    reduce, with_self = args.get("reduce", "sum"), args.get("include_self", True)
    if reduce not in ("sum", "mean") or not (with_self or _is_zeros(into)):
        return None
    of, whole = args["index"].meta["val"], into.meta["val"].shape
    if source.meta["val"].dtype != into.meta["val"].dtype or not of.dim():
        return None
    dim = args["dim"] % of.dim()
    others = [(a, b) for d, (a, b) in enumerate(zip(of.shape, whole, strict=True)) if d != dim]
    if not sizes.same_all(of.shape, source.meta["val"].shape) or not all(sizes.same(a, b) for a, b in others):
        return None
    if any(sizes.static(size) == 0 for size in of.shape):
        return None
    repeated = [
        sizes.static(stride) == 0 or sizes.static(n) == 1 for n, stride in zip(of.shape, of.stride(), strict=True)
    ]
    columns = range(dim + 1, of.dim()) if all(repeated[dim + 1 :]) else range(0)
    batch = range(dim) if columns.start and all(repeated[:dim]) else range(0)
    rows = of.dim() - len(columns) - len(batch)
    shape = _sizes(into)
    lengths = shape[len(batch) : len(batch) + rows]
    along = dim - len(batch) if rows > 1 else None
    tensor, selected = args["index"], (*batch, *columns)
    if along is None:
        tensor, selected = _unrepeated(tensor, dim, selected)
    index = Index((tensor,), lengths, along=along, selected=selected)
    divisor = None if reduce == "sum" else int(with_self)
    return Sum(None if _is_zeros(into) else into, source, index, shape, len(batch), rows, divisor=divisor)


_POOLS: Mapping[Any, int] = {
    aten.max_pool3d_with_indices_backward.default: 3,
    aten.adaptive_max_pool2d_backward.default: 2,
    aten.adaptive_max_pool3d_backward.default: 3,
    aten.fractional_max_pool2d_backward.default: 2,
    aten.fractional_max_pool3d_backward.default: 3,
}
"""The max-pooling backwards for which Inductor calls ATen, with the number of pooled dimensions."""


def _pool(node: Node) -> Sum | None:
    """Describes a max-pooling backward: each gradient is added to one element of its plane."""
    args, shape, dims = bind(node), _sizes(node), _POOLS[node.target]
    gradient, indices = args["grad_output"], args["indices"]
    if not all(isinstance(size, int) for size in shape) or gradient.meta["val"].dtype != node.meta["val"].dtype:
        return None
    plane = math.prod(size for size in shape[-dims:] if isinstance(size, int))
    lengths = (*shape[:-dims], plane)
    if not sizes.same_all(indices.meta["val"].shape, gradient.meta["val"].shape):
        return None
    index = Index((indices,), lengths, along=len(lengths) - 1, flat=dims)
    return Sum(None, gradient, index, shape, 0, len(shape), raises=True)


def _bag(node: Node) -> Sum | None:
    """Describes the gradient of `EmbeddingBag` with mode "max", for which each column has its own row indices."""
    args = bind(node)
    rows, gradient, largest = args["num_weights"], args["grad"], args["maximum_indices"]
    if args["mode"] != _LARGEST or args["sparse"] or not isinstance(rows, int):
        return None
    if not sizes.same_all(largest.meta["val"].shape, gradient.meta["val"].shape):
        return None
    if gradient.meta["val"].dtype != node.meta["val"].dtype:
        return None
    shape = (rows, _sizes(gradient)[1])
    index = Index((largest,), shape, along=0, left_out=-1)
    return Sum(None, gradient, index, shape, 0, 2, raises=True)


_LARGEST = 2
"""The number of mode "max" of `EmbeddingBag` in PyTorch's operators."""


def _unrepeated(index: Node, dim: int, selected: tuple[int, ...]) -> tuple[Node, tuple[int, ...]]:
    """The tensor that an index expands along the dimensions `selected`, and those along which it is repeated."""
    length = sizes.static(index.meta["val"].shape[dim])
    node = index
    while node.target in (aten.expand.default, aten.unsqueeze.default, aten.view.default, aten.reshape.default):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
        if length is not None and sizes.static(node.meta["val"].numel()) == length:
            return node, ()
    return index, selected


_READERS: Mapping[Any, Callable[[Node], Sum | None]] = {
    aten.index_put.default: read_put,
    aten._unsafe_index_put.default: read_put,
    aten.index_add.default: _add,
    aten.scatter_add.default: _scatter,
    aten.scatter_reduce.two: _scatter,
    **dict.fromkeys(_POOLS, _pool),
    aten.embedding_dense_backward.default: _embedding,
    aten._embedding_bag_backward.default: _bag,
}


def _rewritten(node: Node, found: Sum, sorted_keys: dict[Any, tuple[Node, ...]]) -> Record:
    """Rewrites one sum; returns its record."""
    line, module = model_line([node, *node.users])
    facts: dict[str, object] = {
        "shape": [sizes.static(size) for size in node.meta["val"].shape],
        "values": [sizes.static(size) for size in found.values.meta["val"].shape],
        "dtype": str(node.meta["val"].dtype).removeprefix("torch."),
        "least": LEAST,
    }
    name, op, shared = node.name, str(node.target), found.index.identity in sorted_keys
    how = "a sum of segments, sorted before" if shared else "a sort, and a sum of segments"
    if takes_products(found) and _gathered(found) is None:
        how = "products with a matrix of ones and zeros"
        facts["few_rows"] = ONE_HOT_ROWS[found.values.meta["val"].dtype]
    error = replace(node, found, sorted_keys)
    return Record.of_attempt(
        error,
        rewrite=IndexSumsRewrite.name,
        name=name,
        op=op,
        detail=how,
        line=line,
        module=module,
        facts=facts,
    )


def replace(node: Node, found: Sum, sorted_keys: dict[Any, tuple[Node, ...]]) -> str:
    """Replaces a node that computes the sum by index `found` with a sum over sorted segments, or a one-hot matmul.

    Args:
        node: the node.
        found: the sum that the node computes.
        sorted_keys: a cache of the key tensors that earlier replacements in this graph made from indices; those made
            here are added.

    Returns:
        "", or the message of an error; in that case the node stays in the graph.
    """
    emitter, known = Emitter(node.graph), dict(sorted_keys)
    try:
        gathered = _gathered(found)
        is_sorted = gathered is not None or not takes_products(found)
        name: tuple[object, ...] = found.index.identity if is_sorted else ("in any order", *found.index.identity)
        if name not in known:
            known[name] = (_sorted if is_sorted else _unsorted)(emitter, found.index, like=node)
        keys, *order = known[name]
        if gathered is not None:
            found = dataclasses.replace(found, values=gathered[0], values_shape=None, is_gathered=True)
            name = *name, gathered[1], sizes.static(gathered[0].meta["val"].shape[found.batch])
            if name not in known:
                source, index = gathered
                known[name] = keys, _composed(emitter, source, index, order[0], found.batch, like=node)
            keys, *order = known[name]
        given = [size[0] for size in found.shape if not isinstance(size, int)]
        tensors = (found.values, keys, *order, *filter(None, [found.base]), *given)
        result = emitter.inline(functools.partial(_sum, found, is_sorted), tensors, before=node, like=node)
        result = emitter.laid_out(result, like=node)
    except Exception as error:
        log.debug("%s", node, exc_info=error)
        emitter.discard()
        node.meta[FAILED] = True
        return described(error)
    sorted_keys.update(known)
    node.replace_all_uses_with(result)
    erase_dead(node.graph, [node])
    return ""


_GATHERS = (aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default)


def _gathered(found: Sum) -> tuple[Node, Node] | None:
    """The source tensor and row indices [n], if the values of a sum are gathered rows that nothing else reads; else
    None.

    The sum then reads the rows directly, as along the edges of a graph (GNNs), and the gathered values are never
    written.
    """
    node = found.values
    while node.target is aten.expand.default and len(node.users) == 1:
        before = node.args[0]
        assert isinstance(before, Node)
        if not sizes.same_all(before.meta["val"].shape, node.meta["val"].shape):
            return None
        node = before
    is_flat = node.meta["val"].dim() == len(found.shape) - found.rows + 1 and found.index.along is None
    if node.target not in _GATHERS or len(node.users) != 1 or not is_flat or found.divisor is not None:
        return None
    if found.values_shape is not None and not sizes.same_all(found.values_shape, node.meta["val"].shape):
        return None
    args, dim = bind(node), found.batch
    source = args["self"]
    if node.target is aten.index_select.default:
        index = args["index"] if args["dim"] % source.meta["val"].dim() == dim else None
    else:
        index = args["indices"][dim] if len(args["indices"]) == dim + 1 and not any(args["indices"][:dim]) else None
    if index is None or index.meta["val"].dim() != 1 or index.meta["val"].dtype not in (torch.int32, torch.int64):
        return None
    shape = [sizes.static(size) for size in source.meta["val"].shape]
    if None in shape or max(math.prod(size for size in shape if size), 1) > MOST or not shape[dim]:
        return None
    return source, index


def _composed(emitter: Emitter, source: Node, index: Node, places: Node, dim: int, like: Node) -> Node:
    """Inserts the row indices at some positions of an index, before all nodes that may read them."""
    function = functools.partial(_named, rows=source.meta["val"].shape[dim])
    return emitter.inline(function, (index, places), before=emitter.behind(max(index, places)), like=like)


def _named(index: Tensor, places: Tensor, rows: int) -> Tensor:
    """Row indices as int32, with negative ones wrapped; the kernel that reads them checks bounds."""
    named = index[places]
    return torch.where((named < 0) & (named >= -rows), named + rows, named).clamp(-1, rows).to(torch.int32)


def _unsorted(emitter: Emitter, index: Index, like: Node) -> tuple[Node, ...]:
    """Inserts the keys of an index, before all nodes that may read them."""
    tensors = (*index.tensors, *(length[0] for length in index.lengths if not isinstance(length, int)))
    before = emitter.behind(max(tensors))
    return (emitter.inline(functools.partial(_keys, index), tensors, before=before, like=like),)


def _sorted(emitter: Emitter, index: Index, like: Node) -> tuple[Node, ...]:
    """Inserts the sorted keys of an index and their original positions, before all nodes that may read them."""
    (keys,) = _unsorted(emitter, index, like)
    before = emitter.behind(keys)
    stable = {"stable": True, "dim": 0, "descending": False}
    both = emitter.call(aten.sort.stable, (keys,), stable, before=before, like=like)
    first, second = (emitter.call(operator.getitem, (both, i), before=before, like=like) for i in (0, 1))
    return first, second


def _resolved(given: Sequence[Size], tensors: Sequence[Tensor]) -> list[Any]:
    """Sizes as numbers or symbols; dynamic ones are taken from `tensors`, in order."""
    source = iter(tensors)
    return [size if isinstance(size, int) else next(source).shape[size[1]] for size in given]


def _keys(index: Index, *tensors: Tensor) -> Tensor:
    """The key of each value: its row; the number of rows if it is skipped; one more if its index is out of bounds."""
    number = len(index.tensors)
    lengths = _resolved(index.lengths, tensors[number:])
    given = list(tensors[:number])
    rows: Any = math.prod(lengths)
    for dim in sorted(index.selected, reverse=True):
        given = [tensor.select(dim, 0) for tensor in given]
    if index.along is not None:
        tensor = given[0].flatten(-index.flat)
        given = [tensor if dim == index.along else _positions(tensor, dim) for dim in range(len(lengths))]
    places = [torch.where(at < 0, at + n, at) if index.wraps else at for at, n in zip(given, lengths, strict=True)]
    wrong = [(at < 0) | (at >= n) for at, n in zip(places, lengths, strict=True)]
    outside = functools.reduce(torch.logical_or, wrong)
    left_out = None if index.left_out is None else given[0] == index.left_out
    key, *others = places
    for at, length in zip(others, lengths[1:], strict=True):
        key = key * length + at
    known = rows if isinstance(rows, int) else None
    dtype = next(kind for kind, end in _KEYS if kind is torch.int32 or (known is not None and known + 1 < end))
    key = torch.where(outside, rows + 1, key)
    return (key if left_out is None else torch.where(left_out, rows, key)).to(dtype).reshape(-1)


def _positions(tensor: Tensor, dim: int) -> Tensor:
    """The position of each element along a dimension, broadcastable along the others."""
    shape = [tensor.shape[d] if d == dim else 1 for d in range(tensor.dim())]
    return torch.arange(tensor.shape[dim], device=tensor.device).reshape(shape)


def _sum(found: Sum, is_sorted: bool, values: Tensor, keys: Tensor, *others: Tensor) -> Tensor:
    """Computes a sum with our operators; if keys are sorted, their positions are the first of `others`."""
    order, others = others[:is_sorted], others[is_sorted:]
    base = None if found.base is None else others[0]
    shape = _resolved(found.shape, others[found.base is not None :])
    behind = found.batch + found.rows
    batch, rows, columns = map(math.prod, (shape[: found.batch], shape[found.batch : behind], shape[behind:]))
    count = keys.shape[0]
    if found.values_shape is not None:
        values = values.expand(found.values_shape)
    three = values.reshape(batch, values.shape[found.batch] if found.is_gathered else count, columns)
    into = None if base is None else base.reshape(batch, rows, columns)
    total: Tensor = index_sums(into, three, keys, *order, rows) if order else few_sums(into, three, keys, rows)
    if found.divisor is None:
        return total.reshape(shape)
    ones = torch.ones((1, 1, 1), dtype=torch.float32, device=values.device).expand(1, count, 1)
    numbers: Tensor = index_sums(None, ones, keys, *order, rows) + found.divisor
    return (total / numbers.clamp(min=1)).to(values.dtype).reshape(shape)
