"""The module by whose functions Inductor compiles a graph of Dynamo.  Imports Inductor, which installs us into it."""

from torch._inductor import compile_fx

__all__ = ["compile_fx"]
