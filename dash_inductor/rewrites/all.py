"""The rewrites of a graph, in their order."""

from __future__ import annotations

from ..lowering import compile_kernels
from .attention.rewrite import AttentionRewrite
from .embeddings import EmbeddingsRewrite
from .few_indices import FewIndicesRewrite
from .grid_sample import GridSampleRewrite
from .grouped_products import GroupedProductsRewrite
from .index_ranges import IndexRangesRewrite
from .index_sums import IndexSumsRewrite
from .known_masks import KnownMasksRewrite
from .pad_gemm import PadGemmRewrite
from .permutations import PermutationsRewrite
from .rewrite import Rewrite
from .short_sums import ShortSumsRewrite
from .sorted_values import SortedValuesRewrite
from .tied_embeddings import TiedEmbeddingsRewrite
from .user_kernels import UserKernelsRewrite

REWRITES: tuple[Rewrite, ...] = (
    AttentionRewrite(compile_kernels),
    KnownMasksRewrite(),
    SortedValuesRewrite(),
    PermutationsRewrite(),
    FewIndicesRewrite(),
    GridSampleRewrite(),
    IndexRangesRewrite(),
    TiedEmbeddingsRewrite(),
    IndexSumsRewrite(),
    EmbeddingsRewrite(),
    ShortSumsRewrite(),
    PadGemmRewrite(),
    GroupedProductsRewrite(),
    UserKernelsRewrite(),
)
"""Attention reads graphs as PyTorch made them; what is known of indices goes before what holds for any."""
