"""Sizes and strides of fake tensors, static or symbolic: compared without adding guards, or fixed by a guard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols, statically_known_true

Dim = int | torch.SymInt


def static(x: Dim) -> int | None:
    """Return the value of a size if it is static; else None."""
    return x if isinstance(x, int) else x.node.maybe_as_int()


def specialised(x: Dim | float | torch.SymFloat) -> int | float | None:
    """Return the value of a number, fixed by a guard if it is symbolic: other values then recompile.

    Return None if no guard can be added: the number depends on data, the user marked it as dynamic, or the guards of
    this graph are final already.
    """
    if isinstance(x, (int, float)):
        return x
    if has_free_unbacked_symbols(x):
        return None
    if not x.node.expr.is_number and (x.node.shape_env.frozen or _marked_dynamic(x)):
        return None
    return int(x) if isinstance(x, torch.SymInt) else float(x)


def _marked_dynamic(x: torch.SymInt | torch.SymFloat) -> bool:
    """Return whether `x` depends on a size passed to `torch._dynamo.mark_dynamic`, which must not be fixed."""
    symbols = x.node.expr.free_symbols
    for tracked in x.node.shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        sizes = tracked.fake.shape if isinstance(tracked.fake, torch.Tensor) else ()
        for size, constraint in zip(sizes, constraints, strict=False):
            firm = constraint is not None and not constraint.warn_only  # sizes made dynamic by Dynamo may be fixed
            if firm and isinstance(size, torch.SymInt) and size.node.expr.free_symbols & symbols:
                return True
    return False


def same(a: Dim, b: Dim) -> bool:
    """Return whether two sizes are provably equal."""
    return a is b or statically_known_true(a == b)


def made_same(a: Dim, b: Dim) -> bool:
    """Return whether two sizes are equal, provably or for the current inputs; the latter adds a guard."""
    if same(a, b):
        return True
    symbolic = [x for x in (a, b) if isinstance(x, torch.SymInt)]
    if any(has_free_unbacked_symbols(x) or x.node.shape_env.frozen for x in symbolic):
        return False
    return bool(a == b)


def differ(a: Dim, b: Dim) -> bool:
    """Return whether two sizes are provably different."""
    return a is not b and statically_known_true(a != b)


def same_all(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Return whether two lists of sizes are provably equal."""
    return len(a) == len(b) and all(map(same, a, b))


def spanned(value: torch.Tensor) -> Dim:
    """Return the number of bytes from a tensor's first element to its last one, inclusive."""
    span: Dim = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if static(size) == 0:
            return 0
        span = span + (size - 1) * stride
    return span * value.element_size()


def dense_order(size: Sequence[Dim], stride: Sequence[Dim]) -> tuple[int, ...] | None:
    """Return the dimensions from the largest stride to the smallest if the tensor is dense; else None.

    A dense tensor made with this order has the strides `stride`, if possible even in dimensions of size 1.
    """
    unit = [static(n) == 1 for n in size]
    for exact in (True, False):
        for order in itertools.permutations(range(len(size))):
            expected: Dim = 1
            for d in reversed(order):
                if not ((unit[d] and not exact) or same(stride[d], expected)):
                    break
                expected = expected * size[d]
            else:
                return order
    return None
