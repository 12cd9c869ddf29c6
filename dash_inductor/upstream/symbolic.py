"""The integer functions that occur in symbolic sizes, such as floor division.  Imports sympy."""

from torch.utils._sympy.functions import CeilDiv, FloorDiv, PythonMod

__all__ = ["CeilDiv", "FloorDiv", "PythonMod"]
