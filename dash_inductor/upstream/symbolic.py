"""Functions of integers in symbolic sizes.  Imports sympy."""

from torch.utils._sympy.functions import CeilDiv, FloorDiv, PythonMod

__all__ = ["CeilDiv", "FloorDiv", "PythonMod"]
