"""The rewrites of a graph, in their order."""

from __future__ import annotations

from ..lowering import compile_kernels
from .attention.rewrite import AttentionRewrite
from .embeddings import EmbeddingsRewrite
from .few_indices import FewIndicesRewrite
from .pad_gemm import PadGemmRewrite
from .permutations import PermutationsRewrite
from .rewrite import Rewrite
from .user_kernels import UserKernelsRewrite

REWRITES: tuple[Rewrite, ...] = (
    AttentionRewrite(compile_kernels),
    EmbeddingsRewrite(),
    PermutationsRewrite(),
    FewIndicesRewrite(),
    PadGemmRewrite(),
    UserKernelsRewrite(),
)
