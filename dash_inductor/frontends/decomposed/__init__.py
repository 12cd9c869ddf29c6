"""Decomposed attention: a softmax between two matrix products, written by the program or by SDPA's math backend."""

from .frontend import find

__all__ = ["find"]
