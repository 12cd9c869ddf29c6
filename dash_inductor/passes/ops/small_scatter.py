"""Replaces scatters of at most 16 elements along a dimension by sums of ``where(position == index, value, 0)``.

The gradient of values selected by `topk`, or of the log-probabilities of labels, has only a few nonzero elements in
each slice along that dimension, such as the vocabulary for one token.  PyTorch fills a tensor with zeros and scatters
into it; under deterministic algorithms, ATen sorts the indices for that.  As a sum of a few terms, the gradient is
computed where it is read: Inductor fuses it into the kernels of its readers, and usually does not write it to memory.

The terms are added in the order of the indices, in fp32.  An index out of bounds triggers a device-side assertion, as
in Inductor's own kernels.  If the graph does not prove that all indices are in bounds, the index is read through a
gather of positions, which checks it, and wraps negative indices if the operator does.
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
from .indices import Scatter, constant, cut, replaced, scatters
from .uniqueness import distinct_along, values_of

aten = torch.ops.aten

MOST = 16
"""The maximum number of indices per line."""
CHEAP, CHEAP_WRITTEN = 8, 4
"""The maximum number of terms that take less time than writing and reading an element or, for an output of the graph,
than writing it.  By instruction count, a term takes 0.28 ps on an H100; 4 bytes take 1.3 ps."""
MOST_TERMS = 1 << 29
"""The maximum number of terms over all elements, if an element has more terms than that: they take 150 us on an H100,
as long as ATen's kernels."""


@dataclass(frozen=True)
class SmallScatterRewrite:
    """The pass that replaces scatters into a constant tensor by sums of a few terms, on CUDA.

    A scatter is replaced if it writes at most `MOST` elements to each 1-D slice along its dimension.
    """

    name: ClassVar[str] = "small_scatter"

    def is_on(self, config: Config) -> bool:
        return self.name in config.rewrites

    def apply(self, graph: Graph) -> Sequence[Result]:
        records = (_rewritten(scatter) for scatter in scatters(graph))
        return [Result(record) for record in records if record is not None]

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns no fallback records: without this pass, PyTorch's scatter runs, which is deterministic, too."""
        return []


def pays(count: int, elements: int | None, written: bool = False) -> bool:
    """Returns whether a sum of `count` terms for each element of the result takes less time than a scatter.

    Args:
        count: the number of indices for each 1-D slice along the dimension of the scatter.
        elements: the number of elements of the result; None if it is dynamic.
        written: whether the result is an output of the graph.
    """
    cheap = CHEAP_WRITTEN if written else CHEAP
    return count <= cheap or (count <= MOST and elements is not None and count * elements <= MOST_TERMS)


def _rewritten(scatter: Scatter) -> Record | None:
    """Rewrites a scatter; returns its record, or None for a scatter that is not replaced."""
    count, fill = count_of(scatter), constant(scatter.base)
    if not count or fill is None or not _pays(scatter, count):
        return None
    if scatter.adds and fill != 0:
        return None
    differ = count == 1 or (
        distinct_along(scatter.indices, scatter.dim) if not scatter.by_rows else _all_differ(scatter.indices)
    )
    number = None if isinstance(scatter.values, Node) else scatter.values
    if not differ and not scatter.adds and number is None:
        return None  # which of equal indices wins is up to the operator
    if not scatter.fills_lines:
        return None
    known = values_of(scatter.indices)
    proved = known is not None and known.lie_below(scatter.shape[scatter.dim])
    function = functools.partial(
        sums,
        dim=scatter.dim,
        by_rows=scatter.by_rows,
        lines=scatter.lines,
        count=count,
        fill=fill,
        number=number,
        adds=scatter.adds and not differ,
        checks=not proved,
        wraps=scatter.wraps,
    )
    facts: dict[str, object] = {
        "of_a_line": count,
        "rule": {"most": MOST, "cheap": [CHEAP, CHEAP_WRITTEN], "most_terms": MOST_TERMS},
    }
    detail = f"{count} {'indices' if count > 1 else 'index'} of a line: computed where it is read"
    values = (scatter.values,) if isinstance(scatter.values, Node) else ()
    return replaced(
        scatter, SmallScatterRewrite.name, detail, facts, function, (scatter.base, scatter.indices, *values)
    )


def _pays(scatter: Scatter, count: int) -> bool:
    written = any(user.op == "output" for user in scatter.node.users)
    return pays(count, sizes.static(scatter.node.meta["val"].numel()), written)


def _all_differ(indices: Node) -> bool:
    known = values_of(indices)
    return known is not None and known.differ


def count_of(scatter: Scatter) -> int | None:
    """Returns how many indices a scatter has for each 1-D slice along its dimension; None if that is dynamic."""
    shape = scatter.indices.meta["val"].shape
    if not scatter.by_rows:
        return sizes.static(shape[scatter.dim])
    count = 1
    for size in shape[0 if scatter.lines is None else 1 :]:
        known = sizes.static(size)
        if known is None:
            return None
        count *= known
    return count


def sums(
    base: Tensor,
    indices: Tensor,
    values: Tensor | None = None,
    *,
    dim: int,
    by_rows: bool,
    lines: int | None,
    count: int,
    fill: float,
    number: float | None,
    adds: bool,
    checks: bool,
    wraps: bool,
) -> Tensor:
    """Returns the result of a scatter into a tensor filled with `fill`, computed as a sum of `count` terms per element.

    Args:
        base: a tensor with the shape and dtype of the result.
        indices, values: the indices and the values for them, see `Scatter`; values are None if `number` is given.
        dim: the dimension along which indices count.
        by_rows: whether each index selects a whole slice; else it selects one element.
        lines: a dimension with separate indices for each of its elements, or None, see `Scatter`.
        count: the number of indices for each 1-D slice along `dim`.
        fill: the number with which the tensor is filled.
        number: the value for all indices if `values` is None; else None.
        adds: whether values with equal indices are added to `fill`, which is 0; else the last one replaces it.
        checks: whether indices may be out of bounds, and are checked by a device-side assertion.
        wraps: whether negative indices count from the end.
    """
    positions = torch.arange(base.shape[dim], dtype=torch.int64, device=base.device)
    positions_along = positions.view([-1] + [1] * (base.dim() - dim - 1))
    wide = torch.float32 if adds and base.dtype in (torch.float16, torch.bfloat16) else base.dtype
    none = torch.full((), fill, dtype=wide, device=base.device)
    total = none.expand(base.shape)
    per_line = _of_lines(indices, base, dim, by_rows, lines, count)
    each_value = None if values is None else _values_of_lines(values, indices, base, dim, by_rows, lines, count)
    for each in range(count):
        index = per_line.narrow(dim, each, 1)
        if checks:
            index = _checked(index, positions, wraps)
        if each_value is None:
            value = torch.full((), number or 0, dtype=wide, device=base.device)
        else:
            value = each_value.narrow(dim, each, 1).to(wide)
        total = (
            total + torch.where(positions_along == index, value, none)
            if adds
            else (torch.where(positions_along == index, value, total))
        )
    return total.to(base.dtype)


def _of_lines(indices: Tensor, base: Tensor, dim: int, by_rows: bool, lines: int | None, count: int) -> Tensor:
    """The indices per line, with the dimensions of `base` and size `count` along `dim`."""
    if not by_rows:
        return indices
    behind = [1] * (base.dim() - dim - 1)
    if lines is None:
        return indices.reshape([1] * dim + [count, *behind])
    return indices.reshape([1] * lines + [indices.shape[0], count, *behind])


def _values_of_lines(
    values: Tensor, indices: Tensor, base: Tensor, dim: int, by_rows: bool, lines: int | None, count: int
) -> Tensor:
    """The values per line, with the dimensions of `base` and size `count` along `dim`."""
    if not by_rows:
        return cut(values, indices.shape)
    first = dim if lines is None else lines
    full = [*base.shape[:first], *indices.shape, *base.shape[dim + 1 :]]
    return values.expand(full).reshape([*base.shape[:dim], count, *base.shape[dim + 1 :]])


def _checked(index: Tensor, positions: Tensor, wraps: bool) -> Tensor:
    """Checks an index: an assertion fails if it is out of bounds; negative ones wrap if `wraps`."""
    if wraps:
        position: Tensor = aten.index.Tensor(positions, [index])
        return position
    bounded = torch.where(index < 0, positions.shape[0], index)  # only torch 2.11's Inductor gather wraps indices
    return positions.gather(0, bounded.to(torch.int64).reshape(-1)).view(index.shape)
