"""All passes in the order in which they are applied, and the functions that apply them to a graph."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph

from ..lowering import compile_kernels
from .attention.rewrite import AttentionRewrite
from .base import runner
from .base.rewrite import Rewrite
from .ops.embeddings import EmbeddingsRewrite
from .ops.grid_sample import GridSampleRewrite
from .ops.grouped_mm import GroupedMmRewrite
from .ops.index_ranges import IndexRangesRewrite
from .ops.index_sums import IndexSumsRewrite
from .ops.known_masks import KnownMasksRewrite
from .ops.pad_mm import PadMmRewrite
from .ops.permutations import PermutationsRewrite
from .ops.small_scatter import SmallScatterRewrite
from .ops.sorted_values import SortedValuesRewrite
from .ops.tied_embeddings import TiedEmbeddingsRewrite
from .ops.unrolled_reductions import UnrolledReductionsRewrite
from .ops.user_kernels import UserKernelsRewrite

REWRITES: tuple[Rewrite, ...] = (
    AttentionRewrite(compile_kernels),
    KnownMasksRewrite(),
    SortedValuesRewrite(),
    PermutationsRewrite(),
    SmallScatterRewrite(),
    GridSampleRewrite(),
    IndexRangesRewrite(),
    TiedEmbeddingsRewrite(),
    IndexSumsRewrite(),
    EmbeddingsRewrite(),
    UnrolledReductionsRewrite(),
    PadMmRewrite(),
    GroupedMmRewrite(),
    UserKernelsRewrite(),
)
"""All passes, in the order in which they run.  The attention pass is first, because it matches graphs as PyTorch made
them; passes that need facts about indices run before those that replace any indexed operation."""


def rewrite_graph(graph: Graph, rewrites: Sequence[Rewrite] = REWRITES) -> bool:
    """Rewrites a graph in place with the given passes, by default all; returns whether it was changed.

    See `base.runner.rewrite_graph` for the errors that it raises under `config.strict`.
    """
    return runner.rewrite_graph(graph, rewrites)


def record_unseen(graphs: Sequence[Graph], cause: str, rewrites: Sequence[Rewrite] = REWRITES) -> bool:
    """Records the sites of graphs on which no pass runs (attentions and others) as not replaced.

    See `base.runner.record_unseen`.

    Args:
        graphs: the graphs.
        cause: the settings of Inductor because of which no pass runs.
        rewrites: the passes whose sites are recorded, by default all.

    Returns:
        Whether a pass would have replaced a site.
    """
    return runner.record_unseen(graphs, cause, rewrites)
