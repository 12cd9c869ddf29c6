"""Inductor's table of decompositions, by operator.  Imports Inductor."""

from torch._inductor.decomposition import decompositions

__all__ = ["decompositions"]
