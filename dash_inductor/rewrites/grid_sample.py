"""The backward of `grid_sample` in two dimensions, for which PyTorch has no deterministic kernel on CUDA.

Its operator is replaced by what autograd makes of the forward's decomposition.  That adds a gradient to the corners
around each position by `index_put`, which `index_sums` rewrites next.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..config import Config
from ..errors import described
from ..graph import sizes
from ..graph.emit import Emitter, erase_dead
from ..graph.model_line import model_line
from ..graph.nodes import bind
from ..model.reasons import Reason
from ..records.records import Record
from ..upstream.decomposing import grid_sampler_2d
from .index_sums import is_ours
from .rewrite import Result

log = logging.getLogger("dash_inductor")

OPERATOR = torch.ops.aten.grid_sampler_2d_backward.default
_FAILED = "dash_inductor_grid_sample"  # in the metadata of an operator that an error has left as it was


@dataclass(frozen=True)
class GridSampleRewrite:
    """Backwards of `grid_sample` on CUDA."""

    name: ClassVar[str] = "grid_sample"

    def is_on(self, config: Config) -> bool:
        return config.rewrites == "all" and config.index_sums == "on"

    def apply(self, graph: Graph) -> Sequence[Result]:
        found = graph.find_nodes(op="call_function", target=OPERATOR)
        return [
            Result(_rewritten(node))
            for node in found
            if _FAILED not in node.meta and is_ours(bind(node)["grad_output"].meta["val"].device)
        ]

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Without passes PyTorch's operator raises an error of its own."""
        return []


def gradient(args: dict[str, Any], which: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The gradient of the image (0) or of the grid (1), from the gradient of the result, the image and the grid."""

    def function(grad_output: Tensor, image: Tensor, grid: Tensor) -> Tensor:
        leaves = image.detach().requires_grad_(), grid.detach().requires_grad_()
        with torch.enable_grad():
            out = grid_sampler_2d(
                leaves[0], leaves[1], args["interpolation_mode"], args["padding_mode"], args["align_corners"]
            )
        (found,) = torch.autograd.grad(out, leaves[which], grad_output, allow_unused=True)
        return torch.zeros_like(leaves[which]) if found is None else found  # the nearest one changes with no position

    return function


def _rewritten(node: Node) -> Record:
    """Rewrite one backward; returns its record."""
    args, emitter, error = bind(node), Emitter(node.graph), ""
    tensors = args["grad_output"], args["input"], args["grid"]
    line, module = model_line([node, *node.users])
    facts = {name: [sizes.static(n) for n in args[name].meta["val"].shape] for name in ("input", "grid")}
    name, results = node.name, [user for user in node.users if user.target is operator.getitem]
    made: dict[Node, Node] = {}
    try:
        for result in results:
            which: Any = result.args[1]
            function = gradient(args, which)
            made[result] = emitter.inline(function, tensors, before=result, like=result, with_autograd=True)
    except Exception as raised:
        log.debug("%s", node, exc_info=raised)
        emitter.discard()
        node.meta[_FAILED] = True
        error = described(raised)
    else:
        for result, new in made.items():
            result.replace_all_uses_with(new)
        erase_dead(node.graph, [*made])
    return Record(
        rewrite=GridSampleRewrite.name,
        name=name,
        op=OPERATOR._schema.name,
        status="kept" if error else "replaced",
        reason=Reason.INTERNAL_ERROR if error else None,
        detail=error or "sums by index of what each position adds to the corners around it",
        line=line,
        module=module,
        facts=facts,
    )
