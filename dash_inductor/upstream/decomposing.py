"""Tracing functions into graphs of the operators that Inductor lowers.  Imports Inductor's decompositions."""

from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["enable_python_dispatcher", "make_fx", "select_decomp_table"]
