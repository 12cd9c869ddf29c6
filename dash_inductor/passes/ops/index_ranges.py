"""Turns sums by index whose indices depend only on positions, as in backwards of resampling, into banded matmuls.

The backward of `interpolate` (nearest, linear, cubic) adds gradients at an index that increases with the position in
each dimension and does not depend on inputs.  So the values of a row form a range of positions in each dimension, and
can be gathered instead of scattered.  The starts of the ranges and their weights are computed on the device from the
index and the weights that the forward reads.  These tables are small; they are written to memory once, so that kernels
do not recompute them for each element.  The maximum length of a range is known at compile time: the index is evaluated
with bounds that hold for any rounding and FMA contraction (`evaluated`).

The backwards of adaptive average pooling and of antialiased interpolation, for which PyTorch has no deterministic
kernels, are sums of this kind, too: the windows that contain an element are neighbours.

A sum of few values becomes one pointwise kernel that is fused with the computation of the values, without sorts or
atomics.  A sum of more values becomes a kernel per dimension, of which the first also computes the values.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
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
from ...records.records import Record
from ...upstream.fake import unset_fake_temporarily
from ...upstream.memory import write_once
from ..base.rewrite import Result
from .index_sums import Sum, adds_floats, is_sum, pays, read_put
from .ranges import COMPARED, CUBIC, LANCZOS, TRIANGLE, Band, Filter, antialiased, weighted, windows
from .separable import Map, adds_up, read_map, together

log = logging.getLogger("dash_inductor")
aten = torch.ops.aten

_FAILED = "dash_inductor_index_ranges"  # in node.meta of an operator that was kept after an error


@dataclass(frozen=True)
class IndexRangesRewrite:
    """The pass that turns sums by index whose indices depend only on positions into banded matmuls, on CUDA.

    It also replaces the backwards of adaptive average pooling and of antialiased interpolation.
    """

    name: ClassVar[str] = "index_ranges"

    def is_on(self, config: Config) -> bool:
        return self.name in config.rewrites

    def apply(self, graph: Graph) -> Sequence[Result]:
        results = []
        for node in list(graph.nodes):
            read = _BACKWARDS.get(node.target)
            if read is not None and _FAILED not in node.meta and adds_floats(node):
                bands = read(node)
                if bands is not None:
                    results.append(Result(_unpooled(node, bands)))
        for nodes in together({node: put for node in graph.nodes if (put := _put(node)) is not None}):
            puts = [*filter(None, map(_put, nodes))]  # read again: a sum's values may have been rewritten
            whole = read_map(puts)
            parts = (
                [(nodes, whole)]
                if whole is not None
                else [([node], read_map([put])) for node, put in zip(nodes, puts, strict=True)]
            )
            results += [Result(_rewritten(members, found)) for members, found in parts if found is not None]
        return results

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns no fallback records: without this pass, PyTorch's operators run.

        Most of these are deterministic; the others, such as backwards of pooling, raise an error by themselves.
        """
        return []


def _put(node: Node) -> Sum | None:
    """Describes an accumulating `index_put` with an index per dimension that varies only along it; else None."""
    if node.target not in (aten.index_put.default, aten._unsafe_index_put.default) or _FAILED in node.meta:
        return None
    found = read_put(node) if is_sum(node) else None
    if found is None or found.base is not None or found.values_shape is not None or not pays(found):
        return None
    tensors = found.index.tensors
    for axis, tensor in enumerate(tensors):
        behind = len(tensors) - tensor.meta["val"].dim()
        shape = enumerate(tensor.meta["val"].shape, behind)
        if behind > axis or any(sizes.static(size) != 1 for dim, size in shape if dim != axis):
            return None
    return found


def _adaptive(node: Node, dims: int) -> list[Band] | None:
    """The windows of an adaptive pooling backward; None for dynamic sizes, or if an element is in too many windows."""
    gradient = bind(node)["grad_output"].meta["val"]
    pairs = [[sizes.static(size) for size in value.shape[-dims:]] for value in (node.meta["val"], gradient)]
    bands = []
    for size, count in zip(*pairs, strict=True):
        if not size or not count or size * count > COMPARED:
            return None
        with unset_fake_temporarily():
            bands.append(windows(size, count))
    return bands if all(band.fits for band in bands) else None


def _antialiased(node: Node, kind: Filter) -> list[Band] | None:
    """The filters of an antialiased interpolation backward; None for dynamic sizes or too wide filters."""
    args = bind(node)
    gradient, scales = args["grad_output"].meta["val"], (args["scales_h"], args["scales_w"])
    pairs = [[sizes.static(size) for size in value.shape[-2:]] for value in (node.meta["val"], gradient)]
    bands = []
    for rows, positions, given in zip(*pairs, scales, strict=True):
        if not rows or not positions or rows * positions > COMPARED or isinstance(given, Node):
            return None
        scale = 1 / given if given else rows / positions
        if args["align_corners"]:
            scale = (rows - 1) / (positions - 1) if positions > 1 else 0.0
        with unset_fake_temporarily():
            bands.append(antialiased(rows, positions, scale, kind))
    return bands if all(band.fits for band in bands) else None


_BACKWARDS: dict[Any, Callable[[Node], list[Band] | None]] = {
    aten._adaptive_avg_pool2d_backward.default: functools.partial(_adaptive, dims=2),
    aten._adaptive_avg_pool3d_backward.default: functools.partial(_adaptive, dims=3),
    aten._upsample_bilinear2d_aa_backward.default: functools.partial(_antialiased, kind=TRIANGLE),
    aten._upsample_bicubic2d_aa_backward.default: functools.partial(_antialiased, kind=CUBIC),
}
"""The backwards without a deterministic kernel in PyTorch, with functions that return the bands of their last
dimensions."""
if hasattr(aten, "_upsample_lanczos2d_aa_backward"):  # torch 2.13
    _BACKWARDS[aten._upsample_lanczos2d_aa_backward.default] = functools.partial(_antialiased, kind=LANCZOS)


def unpooled(gradient: Tensor, bands: Sequence[Band]) -> Tensor:
    """Computes the backward of adaptive average pooling or antialiased interpolation: the gradient of its input.

    Args:
        gradient: the gradient of the output, [..., positions of each dimension].
        bands: for each of the last dimensions, the banded matrix by which it is multiplied.

    Returns:
        [..., rows of each dimension], in the dtype of `gradient`.
    """
    tables = []
    for band in bands:
        tables += [band.begins(gradient.device), band.weights(gradient, dtype=_exact(gradient))]
    return weighted(gradient, *tables, batch=gradient.dim() - len(bands))


def _exact(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _unpooled(node: Node, bands: Sequence[Band]) -> Record:
    """Rewrites one backward of pooling or interpolation; returns its record."""
    gradient, function = bind(node)["grad_output"], functools.partial(unpooled, bands=bands)
    return _recorded(
        [node], gradient, bands, lambda emitter: emitter.inline(function, (gradient,), before=node, like=node)
    )


def _rewritten(nodes: Sequence[Node], found: Map) -> Record:
    """Rewrites sums by index whose results are added together; returns their record."""
    last, bands = nodes[-1], [dimension.band for dimension in found.dimensions]
    result = found.source.meta["val"].dtype
    values, dtype = _unconverted(found.source), _exact(found.source.meta["val"])

    def function(source: Tensor, *weights: Tensor) -> Tensor:
        begins = [band.begins(source.device) for band in bands]
        tables = itertools.chain.from_iterable(zip(begins, weights, strict=True))
        return weighted(source, *tables, batch=found.batch, dtype=result)

    def emit(emitter: Emitter) -> Node:
        weights = [
            emitter.inline(functools.partial(band.weights, dtype=dtype), dimension.nodes, before=last, like=last)
            for band, dimension in zip(bands, found.dimensions, strict=True)
        ]
        return emitter.inline(function, (values, *weights), before=last, like=last)

    for node in found.read:
        write_once(node)  # as for PyTorch's sums, for which the forward saves them
    return _recorded(nodes, found.source, bands, emit)


def _unconverted(values: Node) -> Node:
    """The 16-bit tensor before a conversion to fp32, if there is one; Inductor stores it if it has several readers."""
    before = values.args[0] if values.target is torch.ops.prims.convert_element_type.default else None
    if values.meta["val"].dtype == torch.float32 and isinstance(before, Node):
        given = before.meta["val"].dtype
        if given in (torch.bfloat16, torch.float16):
            return before
    return values


def _recorded(nodes: Sequence[Node], values: Node, bands: Sequence[Band], emit: Callable[[Emitter], Node]) -> Record:
    """Replaces nodes that are added together by the result of `emit`; returns the record.

    An error leaves the nodes as they were.
    """
    *others, node = nodes
    line, module = model_line([node, *node.users])
    longest = [band.longest for band in bands]
    facts: dict[str, object] = {
        "shape": [sizes.static(size) for size in node.meta["val"].shape],
        "values": [sizes.static(size) for size in values.meta["val"].shape],
        "longest": longest,
        "sums": len(nodes),
        "dtype": str(node.meta["val"].dtype).removeprefix("torch."),
    }
    name, op, error, emitter = node.name, str(node.target), "", Emitter(node.graph)
    try:
        result = emitter.laid_out(emit(emitter), like=node)
    except Exception as raised:
        log.debug("%s", node, exc_info=raised)
        emitter.discard()
        for each in nodes:
            each.meta[_FAILED] = True
        error = described(raised)
    else:
        for other in others:
            _leave_out(other)
        node.replace_all_uses_with(result)
        erase_dead(node.graph, [node])
    return Record.of_attempt(
        error,
        rewrite=IndexRangesRewrite.name,
        name=name,
        op=op,
        detail=f"a sum of {' x '.join(map(str, longest))} values at most, side by side",
        line=line,
        module=module,
        facts=facts,
    )


def _leave_out(node: Node) -> None:
    """Removes a node and its addition to another one."""
    adding = adds_up(node)
    assert adding is not None
    (other,) = (arg for arg in adding.all_input_nodes if arg is not node)
    adding.replace_all_uses_with(other)
    erase_dead(node.graph, [adding])
