"""Attention that a graph computes by a softmax between two products, whether the program wrote it so or PyTorch did."""

from .frontend import find

__all__ = ["find"]
