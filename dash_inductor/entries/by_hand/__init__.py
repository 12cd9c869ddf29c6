"""Attention that a graph computes by a softmax between two products, whether the program wrote it so or PyTorch did."""

from .find import find

__all__ = ["find"]
