"""Replaces scatters whose indices provably hit each row equally often by gathers with the inverse permutation.

A mixture-of-experts layer sorts its tokens by expert and reads them in that order, `x[order // k]`.  Afterwards it
reads the results in token order, `y[inverse]`, or adds them to the tokens.  The backwards of these gathers, and some
forwards, are scatters.  Under deterministic algorithms Inductor calls ATen for every scatter by an index tensor, which
sorts the indices again, in about ten kernels.

If the indices are a permutation (`uniqueness`), the inverse permutation gives the source of each row, so the scatter is
a gather.  If each row occurs k times, it is a sum of k gathers in the order of the inverse, in fp32.  Inductor fuses
either with its readers.  The inverse is computed once for all of them, by one scatter (`operators.distinct`).

Distinct indices that do not cover all rows are scattered into zeros by the same operator.  For long rows it scatters
the rows' positions, so that the gather by these can be fused; for short rows it scatters the values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...config import Config
from ...graph import sizes
from ...records.records import Record
from ..base.rewrite import Result
from . import small_scatter
from .indices import Scatter, constant, cut, is_iota, replaced, scatters, source
from .operators.distinct import put_distinct
from .operators.unrolled_reductions import MOST, short_sum
from .uniqueness import Lists, distinct_along, inverted, lists_of, values_of

aten = torch.ops.aten

LEAST_ROW_BYTES = 32
"""The minimum size of a row in bytes for a gather by positions, which writes and reads 16 bytes per position."""


@dataclass(frozen=True)
class PermutationsRewrite:
    """The pass that replaces scatters by gathers, or by scatters without a sort, on CUDA.

    It replaces those whose indices are proved to be distinct or to select each row equally often.
    """

    name: ClassVar[str] = "permutations"

    def is_on(self, config: Config) -> bool:
        return self.name in config.rewrites

    def apply(self, graph: Graph) -> Sequence[Result]:
        records = (_rewritten(scatter) for scatter in scatters(graph))
        return [Result(record) for record in records if record is not None]

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns no fallback records: without this pass, PyTorch's scatter runs, which is deterministic, too."""
        return []


def _rewritten(scatter: Scatter) -> Record | None:
    """Rewrites a scatter; returns its record, or None for a scatter that is not replaced."""
    if not isinstance(scatter.values, Node) or scatter.lines is not None:
        return None
    zeros = constant(scatter.base) == 0
    index = scatter.indices if scatter.by_rows else _of_slices(scatter)
    if index is None:
        return _by_lines(scatter, scatter.values) if zeros else None
    lists = lists_of(index, scatter.shape[scatter.dim])
    if lists is not None and (scatter.adds or lists.times == 1) and scatter.fills_lines:
        return _by_lists(scatter, index, scatter.values, lists, zeros)
    known = values_of(index)
    if (
        zeros
        and known is not None
        and known.differ
        and known.lie_below(scatter.shape[scatter.dim])
        and scatter.fills_lines
    ):
        return _by_places(scatter, index, scatter.values)
    return None


def _of_slices(scatter: Scatter) -> Node | None:
    """The one-dimensional indices of slices that a scatter expands to all elements of a slice; None if it does not."""
    of = scatter.indices
    value: Tensor = of.meta["val"]
    if value.dim() == 1:
        return of
    while str(of.target) in ("aten.clone.default", "aten.alias.default"):
        before = of.args[0]
        assert isinstance(before, Node)
        of = before
    if str(of.target) != "aten.expand.default":
        return None
    given = of.args[0]
    assert isinstance(given, Node)
    shape = [1] * (value.dim() - given.meta["val"].dim()) + list(given.meta["val"].shape)
    repeated = all(sizes.static(size) == 1 for d, size in enumerate(shape) if d != scatter.dim)
    return given if repeated and sizes.same(shape[scatter.dim], value.shape[scatter.dim]) else None


def _by_lists(scatter: Scatter, index: Node, values: Node, lists: Lists, zeros: bool) -> Record:
    """Rewrites a scatter that hits each row equally often to a gather by the inverse, or to a sum of gathers."""
    places = _inverse(scatter, lists.order) if lists.order is not None else None
    function = functools.partial(
        gathered,
        dim=scatter.dim,
        by_rows=scatter.by_rows,
        lists=lists,
        adds=scatter.adds and not zeros,
        is_inverse=places is not None,
    )
    tensors = (scatter.base, index, values, *(() if lists.order is None else (places or lists.order,)))
    if (
        lists.order is not None
        and len(scatter.shape) == 1
        and not function.keywords["adds"]
        and _is_count(values, scatter)
    ):
        function, tensors = functools.partial(stored, is_inverse=places is not None), (places or lists.order,)
    times = "once" if lists.times == 1 else f"{lists.times} times"
    facts: dict[str, object] = {"times": lists.times, "rule": {"most_added": MOST}}
    return replaced(scatter, PermutationsRewrite.name, f"each index occurs {times}: a gather", facts, function, tensors)


def _is_count(values: Node, scatter: Scatter) -> bool:
    """Returns whether the values are 0, 1, 2, ... in int64, so that the scatter computes an inverse permutation."""
    return is_iota(values) and scatter.node.meta["val"].dtype == torch.int64


def _inverse(scatter: Scatter, order: Node) -> Node | None:
    """Returns a node before the scatter that is the inverse of a permutation; None if there is none."""
    known = inverted(order)
    if known is not None:
        return known
    same = source(order)
    waiting = [same]
    while waiting:
        for user in waiting.pop().users:
            if user < scatter.node and user.op == "call_function":
                of = inverted(user)
                if of is not None and source(of) is same:
                    return user
                if source(user) is same:
                    waiting.append(user)
    return None


def _by_places(scatter: Scatter, index: Node, values: Node) -> Record | None:
    """Rewrites a scatter into zeros by distinct indices that do not cover all rows."""
    count, shape = sizes.static(index.meta["val"].numel()), list(scatter.shape)
    if count == 0 or values.meta["val"].dtype == torch.bool:
        return None
    row = 1
    for d, size in enumerate(shape):
        known = sizes.static(size)
        row *= 1 if d == scatter.dim or known is None else known
    by_places = row * values.meta["val"].dtype.itemsize >= LEAST_ROW_BYTES
    function = functools.partial(
        gathered_by_places if by_places else put_rows, dim=scatter.dim, by_rows=scatter.by_rows
    )
    facts: dict[str, object] = {"rule": {"least_row_bytes": LEAST_ROW_BYTES}}
    what = "a gather by the place of each" if by_places else "a scatter"
    detail = f"all indices differ: {what}"
    return replaced(scatter, PermutationsRewrite.name, detail, facts, function, (scatter.base, index, values))


def _by_lines(scatter: Scatter, values: Node) -> Record | None:
    """Rewrites a scatter of single elements whose indices are distinct in each line, as those of `sort` and `topk`."""
    known = values_of(scatter.indices)
    length, count = scatter.shape[scatter.dim], sizes.static(scatter.indices.meta["val"].shape[scatter.dim])
    if count is not None and count <= small_scatter.MOST:
        return None
    if known is None or not known.lie_below(length) or not distinct_along(scatter.indices, scatter.dim):
        return None
    if not scatter.fills_lines:
        return None
    function = functools.partial(put_elements, dim=scatter.dim)
    detail = "the indices of a line differ: a scatter"
    return replaced(scatter, PermutationsRewrite.name, detail, {}, function, (scatter.base, scatter.indices, values))


# ---- replacements of scatters ----


def gathered(
    base: Tensor,
    index: Tensor,
    values: Tensor,
    order: Tensor | None = None,
    *,
    dim: int,
    by_rows: bool,
    lists: Lists,
    adds: bool,
    is_inverse: bool,
) -> Tensor:
    """Returns the result of a scatter that hits each row of `base` along `dim` equally often, computed by gathers.

    Args:
        base: the tensor whose copy the scatter writes to.
        index: the indices, one for each row of the values.
        values: the values to write.
        dim: the dimension of the base along which the indices count.
        by_rows: whether the scatter's own indices select whole slices, so that `values` broadcast; see `Scatter`.
        order: the permutation of `lists` or, if `is_inverse`, its inverse; None for 0, 1, 2, ...
        lists: how the indices derive from the permutation.
        adds: whether the sum is added to `base`; else it replaces the elements of `base`.
        is_inverse: whether `order` is already inverted.
    """
    rows, size, times = _rows(base, index, values, dim, by_rows), base.shape[dim], lists.times
    if order is not None:
        places = order.reshape(-1) if is_inverse else inverse(order)
    else:
        places = torch.arange(index.numel(), dtype=torch.int64, device=index.device)
    if times == 1:
        return _sum([base, _picked(rows, dim, places)] if adds else [_picked(rows, dim, places)])
    of_row = places.view(times, size).t() if lists.strided else places.view(size, times)
    if times <= MOST and not adds:
        found: Tensor = short_sum(_picked(rows, dim, of_row), dim + 1)
        return found
    if times <= MOST:
        return _sum([base, *(_picked(rows, dim, of_row[:, each]) for each in range(times))])
    added = [_wide(_picked(rows, dim, of_row)).sum(dim + 1)]
    return _sum([_wide(base), *added] if adds else added).to(base.dtype)


def gathered_by_places(base: Tensor, index: Tensor, values: Tensor, *, dim: int, by_rows: bool) -> Tensor:
    """Returns the result of a scatter of rows into zeros by distinct indices, computed as a gather.

    First the number of the value that each row of the result gets is scattered, -1 for rows without a value; then the
    values are gathered by these numbers.

    Args:
        base: gives the shape of the result.
        index: distinct indices of rows.
        values: the values to write, in the dtype of the result.
        dim: the dimension of rows.
        by_rows: whether the scatter's own indices select whole rows, so that `values` broadcast; see `Scatter`.
    """
    rows, index = _rows(base, index, values, dim, by_rows), index.reshape(-1)
    count = torch.arange(index.shape[0], dtype=torch.int64, device=index.device)
    places = _put(index, count, base.shape[dim], 0, -1)
    is_named = _along(places >= 0, dim, base.dim()).expand(base.shape)
    found: Tensor = aten._unsafe_masked_index.default(rows, is_named, [*[None] * dim, places], 0)
    return found


def put_rows(base: Tensor, index: Tensor, values: Tensor, *, dim: int, by_rows: bool) -> Tensor:
    """Returns the result of a scatter of rows into zeros by distinct indices, computed by `put_distinct`.

    The arguments are those of `gathered_by_places`; of `base`, only the shape is used.
    """
    rows = _rows(base, index, values, dim, by_rows)
    return _put(_along(index.reshape(-1), dim, base.dim()).expand(rows.shape), rows, base.shape[dim], dim, 0)


def put_elements(base: Tensor, index: Tensor, values: Tensor, *, dim: int) -> Tensor:
    """Returns the result of a scatter of elements into zeros, if the indices in each 1-D slice along `dim` differ.

    `base` only gives the shape of the result.
    """
    return _put(index, cut(values, index.shape), base.shape[dim], dim, 0)


def stored(order: Tensor, *, is_inverse: bool) -> Tensor:
    """Returns an inverse permutation, int64 [n]: `order` if `is_inverse` says that it is one, else its inverse."""
    return order.reshape(-1).to(torch.int64) if is_inverse else inverse(order)


def inverse(order: Tensor) -> Tensor:
    """Returns the inverse of a permutation, int64 [n]."""
    order = order.reshape(-1)
    places = torch.arange(order.shape[0], dtype=torch.int64, device=order.device)
    return _put(order, places, order.shape[0], 0, None)


def _put(indices: Tensor, values: Tensor, size: int, dim: int, rest: float | None) -> Tensor:
    """Calls `operators.distinct.put_distinct`; returns its result."""
    found: Tensor = put_distinct(indices, values, size, dim, rest)
    return found


def _rows(base: Tensor, index: Tensor, values: Tensor, dim: int, by_rows: bool) -> Tensor:
    """The values with a single dimension for rows, at position `dim`."""
    count = index.numel()
    shape = [*base.shape[:dim], count, *base.shape[dim + 1 :]]
    if by_rows:
        return values.expand([*base.shape[:dim], *index.shape, *base.shape[dim + 1 :]]).reshape(shape)
    return cut(values, shape)


def _picked(rows: Tensor, dim: int, places: Tensor) -> Tensor:
    """Gathers rows by positions that are proved to be in bounds, without bounds checks."""
    picked: Tensor = aten._unsafe_index.Tensor(rows, [*[None] * dim, places])
    return picked


def _along(vector: Tensor, dim: int, dims: int) -> Tensor:
    """Views a vector as a tensor with `dims` dimensions, along dimension `dim`."""
    return vector.view([1] * dim + [-1] + [1] * (dims - dim - 1))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """The sum of tensors in order, in fp32 for 16-bit dtypes."""
    total = terms[0]
    if len(terms) > 1:
        for number, term in enumerate(terms):
            total = total + _wide(term) if number else _wide(term)
    return total.to(terms[0].dtype)
