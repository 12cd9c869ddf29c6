"""Lets Dynamo trace an autograd function of attention to which one tensor is passed twice.

Dynamo breaks the graph at ``Function.apply(..., t, t, ...)`` ("duplicate tensor input"), so that forward and backward
run outside of the graph.  flash-attn's `flash_attn_varlen_func` is called this way wherever queries and keys have the
same `cu_seqlens`, and its functions wherever query, key or value are one tensor.  Here the second `t` becomes a view of
the first.  The function returns a gradient for each of its arguments; the gradient of the tensor is their sum, as in
the program that is not compiled.

Other functions stay as they are: they may see whether two arguments are one tensor, or return an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..upstream import dynamo, seams
from .skipped_code import computes_attention


def install(active: Callable[[], bool]) -> None:
    """Gives attention views of repeated tensors, in what is traced while `active()` is true."""
    seams.APPLY_FUNCTION.wrap(lambda plain: _with_views(plain, active))


def _with_views(apply: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Wraps the tracing of ``Function.apply``."""

    def apply_with_views(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if active() and any(map(computes_attention, (self.fwd_fn, self.bwd_fn))):
            args = _distinct(tx, args)
        return apply(self, tx, args, kwargs)

    return apply_with_views


def _distinct(tx: Any, args: list[Any]) -> list[Any]:
    """Returns Dynamo's variables for the arguments, with views in place of tensors that occurred before."""
    found, seen = list[Any](), set[Any]()
    for lazy in args:
        arg = lazy.realize()
        if isinstance(arg, dynamo.TensorVariable):
            node = arg.as_proxy().node
            if node in seen:
                arg = arg.call_method(tx, "view_as", [arg], {})
            seen.add(node)
        found.append(arg)
    return found
