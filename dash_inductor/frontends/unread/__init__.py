"""A net for attention that no frontend reads, so that none is without a record."""

from .net import find

__all__ = ["find"]
