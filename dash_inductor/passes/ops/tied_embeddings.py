"""Gradients of tied weights: adds the rows of the embedding's gradient directly to the gradient from the logits.

A weight that embeds tokens and also produces logits has two gradients.  PyTorch makes the embedding's gradient as a
tensor of the table's size, zero except for the rows of the batch, and adds the two.  This pass adds only the rows of
the batch to a copy of the other gradient, in fp32, with `dash_inductor::index_sums`: the sum is rounded once, and no
zeros are written or read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...config import Config
from ...graph import sizes
from ...graph.model_line import model_line
from ...graph.nodes import bind
from ...records.records import Record
from ..base.rewrite import Result
from .embeddings import OPERATOR
from .index_sums import EMBEDDED_ROWS, FAILED, Index, Sum, is_sum, padding_of, pays, replace

aten = torch.ops.aten

LEAST = 1 << 22
"""The minimum number of elements of a table; for smaller ones, launches take as long as writing the zeros."""


@dataclass(frozen=True)
class TiedEmbeddingsRewrite:
    """The pass that replaces the addition of the two gradients of a tied weight (embedding and logits), on CUDA."""

    name: ClassVar[str] = "tied_embeddings"

    def is_on(self, config: Config) -> bool:
        return self.name in config.rewrites

    def apply(self, graph: Graph) -> Sequence[Result]:
        sorted_keys: dict[Any, tuple[Node, ...]] = {}
        results = []
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            found = read(node)
            if found is not None:
                results.append(Result(_rewritten(node, found, sorted_keys)))
        return results

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns no fallback records: without this pass, PyTorch's kernels run, which are deterministic, too."""
        return []


def read(node: Node) -> Sum | None:
    """Returns the `Sum` (sum by index) that can replace `node`, an addition of an embedding's gradient to another one.

    Returns None if `node` is no addition of this kind, or if a replacement is not worth it at its sizes (`pays`).
    """
    args = bind(node)
    if args["alpha"] != 1 or FAILED in node.meta or not is_sum(node):
        return None
    for embedded, other in ((args["self"], args["other"]), (args["other"], args["self"])):
        if isinstance(other, Node) and isinstance(embedded, Node) and embedded.target is OPERATOR:
            found = _read(node, embedded, other)
            if found is not None:
                return found
    return None


def _read(node: Node, embedded: Node, other: Node) -> Sum | None:
    given, table = bind(embedded), node.meta["val"]
    rows, gradient = given["num_weights"], given["grad_output"]
    values = [embedded.meta["val"], other.meta["val"], gradient.meta["val"]]
    if len(embedded.users) > 1 or given["scale_grad_by_freq"] or not isinstance(rows, int) or rows <= EMBEDDED_ROWS:
        return None
    if not all(isinstance(v, Tensor) and v.dtype == table.dtype and v.device == table.device for v in values):
        return None
    columns = sizes.static(table.shape[1])
    if columns is None or rows * columns < LEAST or not sizes.same_all(other.meta["val"].shape, table.shape):
        return None
    index = Index((given["indices"],), (rows,), left_out=padding_of(given))
    found = Sum(other, gradient, index, (rows, columns), 0, 1)
    return found if pays(found) else None


def _rewritten(node: Node, found: Sum, sorted_keys: dict[Any, tuple[Node, ...]]) -> Record:
    """Rewrites one addition; returns its record."""
    line, module = model_line([node, *node.users])
    facts: dict[str, object] = {
        "table": [sizes.static(size) for size in node.meta["val"].shape],
        "values": [sizes.static(size) for size in found.values.meta["val"].shape],
        "dtype": str(node.meta["val"].dtype).removeprefix("torch."),
        "least": LEAST,
    }
    name, op = node.name, str(node.target)
    error = replace(node, found, sorted_keys)
    return Record.of_attempt(
        error,
        rewrite=TiedEmbeddingsRewrite.name,
        name=name,
        op=op,
        detail="the rows of the embedding are added to the other gradient",
        line=line,
        module=module,
        facts=facts,
    )
