"""The rewrites of a graph, in their order."""

from __future__ import annotations

from ..lowering import compile_kernels
from .attention.rewrite import AttentionRewrite
from .embeddings import EmbeddingsRewrite
from .grid_sample import GridSampleRewrite
from .index_ranges import IndexRangesRewrite
from .index_sums import IndexSumsRewrite
from .pad_gemm import PadGemmRewrite
from .rewrite import Rewrite

REWRITES: tuple[Rewrite, ...] = (
    AttentionRewrite(compile_kernels),
    GridSampleRewrite(),
    IndexRangesRewrite(),
    IndexSumsRewrite(),
    EmbeddingsRewrite(),
    PadGemmRewrite(),
)
