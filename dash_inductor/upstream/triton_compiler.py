"""Triton's compiler, called without a GPU: sources, targets and the assembler."""

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

__all__ = ["ASTSource", "GPUTarget", "get_ptxas"]
