"""Computes medians with indices, k-th values and histograms by a stable sort on CUDA, where PyTorch raises an error.

PyTorch's kernels return any of the positions that hold a value, or count with floating-point atomics.  A stable sort
keeps equal elements in order, and groups the elements of a bin, so that they can be counted exactly.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...config import Config
from ...graph import sizes
from ...graph.emit import Emitter
from ...graph.nodes import bind
from ...records.records import Record
from ..base.rewrite import Result
from . import replaced_operators
from .indices import NUMBERS

aten = torch.ops.aten

DEVICES = ("cuda",)
"""The device types on which these operators are rewritten."""


@dataclass(frozen=True)
class SortedValuesRewrite:
    """The pass that computes medians along a dimension, k-th values, and histograms with bounds by a sort, on CUDA.

    It replaces `median.dim`, `nanmedian.dim`, `kthvalue` and `histc`.
    """

    name: ClassVar[str] = "sorted_values"

    def is_on(self, config: Config) -> bool:
        return self.name in config.rewrites

    def apply(self, graph: Graph) -> Sequence[Result]:
        found = [node for node in graph.nodes if node.target in _PLACES or node.target is aten.histc.default]
        return [Result(_rewritten(node)) for node in found if node.users and takes_sort(node)]

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns no fallback records: without this pass, PyTorch's operators raise errors of their own at run time."""
        return []


def takes_sort(node: Node) -> bool:
    """Returns whether an operator that the pass knows can be replaced.

    Its tensor must be on CUDA.  `histc` must have bounds; the others must select along a dimension of static size.
    """
    args = bind(node)
    given = args["self"].meta["val"]
    if given.device.type not in DEVICES or given.dtype not in NUMBERS:
        return False
    if replaced_operators.has_failed(SortedValuesRewrite.name, node):
        return False
    if node.target is aten.histc.default:  # without bounds, PyTorch computes them and checks for non-finite numbers
        return bool(given.dtype.is_floating_point and args["min"] < args["max"])
    return given.dim() > 0 and bool(sizes.static(given.shape[args["dim"]]))


def _median(line: Tensor) -> Tensor:
    """The position of the median in a sorted line, or of the first NaN (NaNs are sorted last)."""
    numbers, length = _numbers(line), line.shape[-1]
    return torch.where(numbers < length, numbers, (length - 1) // 2)


def _median_of_numbers(line: Tensor) -> Tensor:
    """The position of the median of the non-NaN elements in a sorted line."""
    return ((_numbers(line) - 1) // 2).clamp(min=0)


def _numbers(line: Tensor) -> Tensor:
    """The number of non-NaN elements, [..., 1]."""
    return line.isnan().logical_not().sum(-1, keepdim=True)


_PLACES: Mapping[Any, Callable[[Tensor], Tensor] | None] = {
    aten.median.dim: _median,
    aten.nanmedian.dim: _median_of_numbers,
    aten.kthvalue.default: None,
}
"""The operators that select one element of each line, with functions from lines [..., length] to the element's position
in the sorted line, int64 [..., 1]; None if the program gives the position."""


def chosen(x: Tensor, dim: int, place: Callable[[Tensor], Tensor] | None, k: int) -> Tensor:
    """Returns the indices along `dim` of the elements that a median or `kthvalue` selects, int64, with `dim` of size 1.

    Args:
        x: the operand.
        dim: the dimension along which elements are sorted and one is selected.
        place: a function from 1-D slices [..., length] to the position of the selected element in the sorted slice,
            int64 [..., 1]; None for `kthvalue`.
        k: for `kthvalue`, the position in the sorted slice, from 1.
    """
    line = x.movedim(dim, -1)
    order = line.sort(dim=-1, stable=True).indices
    found = order[..., k - 1 : k] if place is None else order.gather(-1, place(line))
    return found.movedim(-1, dim)


def histogram(x: Tensor, bins: int, low: float, high: float) -> Tensor:
    """Computes by a sort the histogram of `x` with `bins` equal bins from `low` to `high` (inclusive).

    The result has the counts, [bins], in the dtype of `x`.  Elements are assigned to bins as by PyTorch's kernels.
    """
    at = x.reshape(-1).to(torch.promote_types(x.dtype, torch.float32))
    part = ((at - low) * bins / (high - low)).clamp(0, bins - 1).to(torch.int32)
    keys = torch.where((at >= low) & (at <= high), part, bins).sort().values
    edges = torch.searchsorted(keys, torch.arange(bins + 1, dtype=torch.int32, device=x.device))
    return (edges[1:] - edges[:-1]).to(x.dtype)


def _rewritten(node: Node) -> Record:
    """Rewrites one operator; returns its record."""
    args = bind(node)
    facts: dict[str, object] = {"shape": [sizes.static(size) for size in args["self"].meta["val"].shape]}

    def make(emitter: Emitter) -> dict[Node, Node]:
        if node.target is not aten.histc.default:
            return _elements(emitter, node, args)
        counts = functools.partial(histogram, bins=args["bins"], low=args["min"], high=args["max"])
        return {node: emitter.inline(counts, (args["self"],), before=node, like=node)}

    detail = "a stable sort, in which equal elements keep their order"
    return replaced_operators.replaced(SortedValuesRewrite.name, node, facts, detail, make)


def _elements(emitter: Emitter, node: Node, args: Mapping[str, Any]) -> dict[Node, Node]:
    """Emits the values and indices of the elements that an operator selects, by the results that they replace."""
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if not results:
        return {}
    given, dim, keepdim = args["self"], args["dim"], args["keepdim"]
    like = next(iter(results.values()))
    choose = functools.partial(chosen, dim=dim, place=_PLACES[node.target], k=args.get("k", 1))
    places = emitter.inline(choose, (given,), before=node, like=like)

    def dropped(found: Tensor) -> Tensor:
        return found if keepdim else found.squeeze(dim)

    functions: dict[Any, tuple[Callable[..., Tensor], tuple[Node, ...]]] = {
        0: (lambda x, at: dropped(x.gather(dim, at)), (given, places)),
        1: (lambda at: dropped(at), (places,)),
    }
    made = {}
    for which, result in results.items():
        function, tensors = functions[which]
        made[result] = emitter.inline(function, tensors, before=node, like=result)
    return made
