"""Detects attention that no frontend can read, so that every attention has a record."""

from .net import find

__all__ = ["find"]
