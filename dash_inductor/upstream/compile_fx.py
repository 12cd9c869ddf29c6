"""The module with which Inductor compiles Dynamo's graphs.  Imports Inductor, which installs dash_inductor into it."""

from torch._inductor import compile_fx

__all__ = ["compile_fx"]
