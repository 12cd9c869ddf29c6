"""Turns sums over 8 to 16 long rows, as over the experts of a token, into additions in a pointwise kernel.

Inductor unrolls reductions of fewer than eight terms.  From eight on it generates a reduction, whose block sizes it
autotunes or, under deterministic algorithms, chooses by a rule: a sum over eight experts then takes three times as
long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...config import Config
from ...graph import sizes
from ...graph.emit import Emitter
from ...graph.nodes import bind
from ...model.site import NOMINAL_BATCH, NOMINAL_LEN
from ...records.records import Record
from ...upstream.partitioner import stand_for
from ..base.rewrite import Result
from . import replaced_operators
from .indices import NUMBERS
from .operators.unrolled_reductions import MOST, short_sum

OPERATOR = torch.ops.aten.sum.dim_IntList

TERMS = range(8, MOST + 1)
"""The supported numbers of terms; Inductor unrolls fewer by itself."""
LEAST_COLUMNS = 32
"""The minimum number of contiguous elements after the summed dimension, which a warp reads together."""
LEAST = 1 << 18
"""The minimum number of sums; fewer are dominated by launch time."""
NOMINAL = NOMINAL_LEN * NOMINAL_BATCH
"""The value that stands for dynamic sizes in the decision."""
DEVICES = ("cuda",)
"""The device types on which sums are rewritten."""


@dataclass(frozen=True)
class UnrolledReductionsRewrite:
    """The pass that unrolls sums over one dimension of 8 to 16 elements that is not the innermost one, on CUDA."""

    name: ClassVar[str] = "unrolled_reductions"

    def is_on(self, config: Config) -> bool:
        return self.name in config.rewrites

    def apply(self, graph: Graph) -> Sequence[Result]:
        found = graph.find_nodes(op="call_function", target=OPERATOR)
        return [Result(_rewritten(node, dim)) for node in found if (dim := summed(node)) is not None]

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns no fallback records: without this pass, PyTorch's kernels run, which are deterministic, too."""
        return []


def summed(node: Node) -> int | None:
    """Returns the dimension, at least 0, along which a node sums if unrolled additions are faster; else None."""
    args, value = bind(node), node.meta.get("val")
    if (
        not isinstance(value, Tensor)
        or value.device.type not in DEVICES
        or replaced_operators.has_failed(UnrolledReductionsRewrite.name, node)
    ):
        return None
    given: Tensor = args["self"].meta["val"]
    dims, dtype = args["dim"], value.dtype
    if not dtype.is_floating_point or dtype not in NUMBERS or given.dtype != dtype or not dims or len(dims) != 1:
        return None
    dim = dims[0] % given.dim()
    behind = [sizes.static(size) for size in given.shape[dim + 1 :]]
    known = [size for size in behind if size is not None]
    if sizes.static(given.shape[dim]) not in TERMS or len(known) < len(behind) or math.prod(known) < LEAST_COLUMNS:
        return None
    sums = math.prod(NOMINAL if (n := sizes.static(size)) is None else n for size in value.shape)
    return dim if sums >= LEAST else None


def _rewritten(node: Node, dim: int) -> Record:
    """Rewrites one sum; returns its record."""
    args: dict[str, Any] = bind(node)
    value, given = node.meta["val"], args["self"].meta["val"]
    facts: dict[str, object] = {
        "shape": [sizes.static(size) for size in given.shape],
        "dim": dim,
        "dtype": str(value.dtype).removeprefix("torch."),
        "rule": {"least": LEAST, "least_columns": LEAST_COLUMNS},
    }

    def make(emitter: Emitter) -> dict[Node, Node]:
        result = emitter.call(short_sum, (args["self"], dim), before=node, like=node)
        stand_for(result, node)
        if args["keepdim"]:
            result = emitter.call(torch.ops.aten.unsqueeze.default, (result, dim), before=node, like=node)
        return {node: result}

    detail = "additions in a pointwise kernel, in the place of a reduction"
    return replaced_operators.replaced(UnrolledReductionsRewrite.name, node, facts, detail, make)
