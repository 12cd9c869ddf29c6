"""Records the choice of a configuration for the program's own autotuned Triton kernels.

Inductor would time the configurations and take the fastest, so that two processes could compute different bits.
Instead, the first configuration that fits the GPU runs.  `install.no_autotune` makes that choice where the kernel's
code is generated and first called; this pass only records it, regardless of `config.rewrites`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, Node

from ...config import Config
from ...graph.model_line import model_line
from ...records.records import Record
from ...upstream.user_kernels import configurations, is_launch, name_of
from ..base.rewrite import Result

_RECORDED = "dash_inductor_recorded"  # in node.meta, because the pass may see the same graph again


@dataclass(frozen=True)
class UserKernelsRewrite:
    """The pass that records launches of the program's autotuned Triton kernels; it does not change the graph."""

    name: ClassVar[str] = "user_kernels"

    def is_on(self, config: Config) -> bool:
        return True

    def apply(self, graph: Graph) -> Sequence[Result]:
        return [Result(_recorded(node)) for node in graph.nodes if is_launch(node) and _is_new(node)]

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns no fallback records: without this pass, the first fitting configuration runs, too, but unrecorded."""
        return []


def _is_new(node: Node) -> bool:
    return len(configurations(node)) > 1 and _RECORDED not in node.meta


def _recorded(node: Node) -> Record:
    node.meta[_RECORDED] = True
    line, module = model_line([node, *node.users])
    found = configurations(node)
    return Record(
        rewrite=UserKernelsRewrite.name,
        name=node.name,
        op=name_of(node),
        status="replaced",
        reason=None,
        detail=f"the first of {len(found)} configurations that fits, without timing: {found[0]}",
        line=line,
        module=module,
        facts={"configurations": found},
    )
