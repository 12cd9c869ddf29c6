"""Lets Dynamo trace an autograd function to which one tensor is passed twice.

Dynamo breaks the graph at ``Function.apply(..., t, t, ...)`` ("duplicate tensor input"), so that forward and backward
run outside of the graph.  flash-attn's `flash_attn_varlen_func` is called this way wherever queries and keys have the
same `cu_seqlens`, and its functions wherever query, key or value are one tensor.  Here the second `t` becomes a view of
the first.  The function returns a gradient for each of its arguments; the gradient of the tensor is their sum, as in
the program that is not compiled.

Functions for which a view is another tensor stay as they are: those that compare tensors by identity, and those whose
results share the memory of the repeated tensor, of which autograd makes other outputs.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from typing import Any

from ..upstream import dynamo, seams

_IDENTITY = frozenset(("id", "is_leaf", "grad_fn", "_base", "_is_view", "_version", "output_nr", "is_", "is_not"))
"""Names with which code sees whether two tensors are one, or whether one is a view."""


def install(active: Callable[[], bool]) -> None:
    """Gives autograd functions views of repeated tensors, in what is traced while `active()` is true."""
    seams.APPLY_FUNCTION.wrap(lambda plain: _with_views(plain, active))


def _with_views(apply: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Wraps the tracing of ``Function.apply``."""

    def apply_with_views(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not active() or not (repeated := _repeated(args)) or _sees_identity(self):
            return apply(self, tx, args, kwargs)
        result = apply(self, tx, _distinct(tx, args), kwargs)
        storages = {_storage(arg) for arg in repeated}
        if any(_storage(found) in storages for found in _tensors(result)):
            return apply(self, tx, args, kwargs)  # Dynamo breaks the graph
        return result

    return apply_with_views


def _repeated(args: list[Any]) -> list[Any]:
    """Returns Dynamo's variables of the tensors that occur among the arguments before."""
    found, seen = list[Any](), set[Any]()
    for lazy in args:
        arg = lazy.realize()
        if isinstance(arg, dynamo.TensorVariable):
            node = arg.as_proxy().node
            found += [arg] * (node in seen)
            seen.add(node)
    return found


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


def _tensors(result: Any) -> Iterator[Any]:
    """Yields the variables of the tensors in a result of Dynamo, also of those in tuples and lists."""
    if isinstance(result, dynamo.TensorVariable):
        yield result
    for item in getattr(result, "items", None) or ():
        yield from _tensors(item)


def _storage(tensor: Any) -> int:
    """Returns a number for the memory of the fake tensor of a variable, the same one for its views."""
    return int(tensor.as_proxy().node.meta["example_value"].untyped_storage()._cdata)


def _sees_identity(function: Any) -> bool:
    """Returns whether the forward or backward of an autograd function asks which tensors are one or are views.

    Functions that they call are searched, those of torch are not.
    """
    own = (function.fwd_fn, function.bwd_fn)
    stack, seen = [*own], set[Any]()
    while stack:
        called = stack.pop()
        if not isinstance(called, types.FunctionType) or called in seen:
            continue
        if (
            str(called.__module__).partition(".")[0] == "torch" and called not in own
        ):  # Dynamo may have written a forward
            continue
        seen.add(called)
        stack += [cell.cell_contents for cell in called.__closure__ or () if cell != types.CellType()]
        for code in _codes(called.__code__):
            if _compares(code) or not _IDENTITY.isdisjoint(code.co_names):
                return True
            stack += [called.__globals__[name] for name in code.co_names if name in called.__globals__]
    return False


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code and those of functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _compares(code: types.CodeType) -> bool:
    """Returns whether a code has the operator ``is`` with something else than a constant, such as None."""
    before = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP" and before != "LOAD_CONST":
            return True
        before = instruction.opname
    return False
