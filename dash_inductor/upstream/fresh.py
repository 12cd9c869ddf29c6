"""Compiling every graph, where what happens while a graph is compiled is to be seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def every_graph_compiled() -> Iterator[None]:
    """Take no graph from a cache inside the block; what compilers have made of source text is still found."""
    import torch._functorch.config as functorch
    from torch._inductor import config as inductor

    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield
