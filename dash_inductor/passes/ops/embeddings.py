"""Gradients of embeddings on CUDA: ATen's sorting kernel, or plain sums for tables of at most four rows.

Inductor decomposes `aten.embedding_dense_backward` into an accumulating `index_put`.  Under deterministic algorithms
that calls a kernel which adds all rows of an index one after another: in BERT, where nearly all tokens have the same
type, it takes more than half the time of the rest of a training step (docs/what-we-know.md).  ATen's kernel for the
undecomposed operator also sorts the indices, but adds the rows of an index in parts of fixed order, without atomics.
So the operator is not decomposed on CUDA (`install.embeddings`).

A small table, as for token types, needs no sort.  The gradient of each of its rows is a sum over all tokens in which
those with other indices are replaced by zeros; Inductor computes these sums in one kernel, in fixed order.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...config import Config
from ...errors import described
from ...graph import sizes
from ...graph.emit import Emitter
from ...graph.model_line import model_line
from ...graph.nodes import bind
from ...records.records import Record
from ..base.rewrite import Result

log = logging.getLogger("dash_inductor")

OPERATOR = torch.ops.aten.embedding_dense_backward.default
FEW = 4
"""The maximum number of rows of a table for plain sums; Inductor fuses this many sums into one kernel."""

_RECORDED = "dash_inductor_recorded"  # in node.meta, because the pass may see the same graph again


@dataclass(frozen=True)
class EmbeddingsRewrite:
    """The pass that replaces the gradients of embedding tables of at most `FEW` rows by sums, on CUDA.

    It records the gradients of larger tables without changing them.
    """

    name: ClassVar[str] = "embeddings"

    def is_on(self, config: Config) -> bool:
        return self.name in config.rewrites

    def apply(self, graph: Graph) -> Sequence[Result]:
        found = graph.find_nodes(op="call_function", target=OPERATOR)
        return [Result(_rewritten(node)) for node in found if _is_new(node)]

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns no fallback records: without this pass, ATen's sorting kernel runs, which is deterministic, too."""
        return []


def _is_new(node: Node) -> bool:
    return node.meta["val"].device.type == "cuda" and _RECORDED not in node.meta


def _rewritten(node: Node) -> Record:
    """Rewrites one gradient; returns its record."""
    node.meta[_RECORDED] = True
    args, value = bind(node), node.meta["val"]
    line, module = model_line([node, *node.users])
    facts = {
        "table": [sizes.static(size) for size in value.shape],
        "indices": [sizes.static(size) for size in args["indices"].meta["val"].shape],
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": str(value.device),
    }
    error, detail = "", "PyTorch's kernel, which sorts the indices, in the place of Inductor's"
    if takes_sums(args):
        error, detail = _put_sums(node, args), "a sum over all indices for each row of the table"
    return Record.of_attempt(
        error,
        rewrite=EmbeddingsRewrite.name,
        name=node.name,
        op=OPERATOR._schema.name,
        detail=detail,
        line=line,
        module=module,
        facts=facts,
    )


def _put_sums(node: Node, args: dict[str, Any]) -> str:
    """Replaces a gradient by sums; returns an error message, or "" without an error."""
    emitter = Emitter(node.graph)
    function = functools.partial(by_sums, rows=args["num_weights"], padding_idx=args["padding_idx"])
    try:
        sums = emitter.inline(function, (args["grad_output"], args["indices"]), before=node, like=node)
    except Exception as error:
        log.debug("%s", node, exc_info=error)
        emitter.discard()
        return described(error)
    node.replace_all_uses_with(sums)
    node.graph.erase_node(node)
    return ""


def takes_sums(args: dict[str, Any]) -> bool:
    """Returns whether the gradient of an embedding table is computed by plain sums instead of ATen's sorting kernel.

    That is so for tables of 1 to `FEW` rows if the gradient is not scaled by frequency.

    Args:
        args: the arguments of `aten.embedding_dense_backward` by name.
    """
    rows = args["num_weights"]
    return isinstance(rows, int) and 0 < rows <= FEW and not args["scale_grad_by_freq"]


def by_sums(grad_output: Tensor, indices: Tensor, rows: int, padding_idx: int) -> Tensor:
    """Returns the gradient of a small embedding table, [rows, columns], with one sum over all indices for each row.

    Args:
        grad_output: [..., columns], the gradient of the embeddings.
        indices: integers [...].
        rows: the number of rows of the table.
        padding_idx: the row without a gradient, or a negative number if there is none.
    """
    flat, columns = indices.reshape(-1, 1), grad_output.reshape(indices.numel(), grad_output.shape[-1])
    none = torch.zeros((), dtype=columns.dtype, device=columns.device)
    sums = [
        columns.new_zeros(columns.shape[1]) if row == padding_idx else torch.where(flat == row, columns, none).sum(0)
        for row in range(rows)
    ]
    return torch.stack(sums)
