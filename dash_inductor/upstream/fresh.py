"""Disables graph caches, and forgets what was compiled, for code that has to observe the compile of a graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def every_graph_compiled() -> Iterator[None]:
    """A context manager that disables FxGraphCache and AOTAutogradCache; caches of compiled sources stay in use."""
    import torch._functorch.config as functorch
    from torch._inductor import config as inductor

    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield


def forget_compiled() -> None:
    """Makes every function that this process has compiled compile anew; imports Dynamo only if it was used."""
    if "torch._dynamo" in sys.modules:
        from torch import compiler

        compiler.reset()
