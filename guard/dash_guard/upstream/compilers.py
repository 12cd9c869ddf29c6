"""The packages of PyTorch and Triton that compile."""

from __future__ import annotations

COMPILERS = ("torch._inductor", "torch._dynamo", "torch._functorch", "triton")
"""The packages that write caches and start compilers while they compile."""
