"""Attention that a graph computes by a softmax between two products, whether the program wrote it so or PyTorch did."""

from .entry import find

__all__ = ["find"]
