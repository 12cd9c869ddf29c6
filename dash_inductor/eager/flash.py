"""PyTorch's FlashAttention operators on a GPU, each compiled on its own, for programs that are not compiled.

`torch.nn.attention.activate_flash_attention_impl` calls `activate`, which puts a function in front of the kernel of
each operator.  The function compiles a graph that has the operator alone, in which the graph pass replaces it.  Where
it is kept, or must not be replaced, PyTorch's own kernel runs.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from .. import _switch
from ..upstream.dispatch import OpOverload
from .determinism import DETERMINISTIC

_aten = torch.ops.aten


@dataclass(frozen=True)
class Replaced:
    """An operator in front of whose kernel a function is put.

    Attributes:
        op: the operator.
        results: how many of its results are computed; `others` makes the rest.
        heads: the dimension of query, key and value that has the heads, counted from the last.
        others: the lengths among its results, and those that only dropout needs, from the arguments of a call.
    """

    op: OpOverload
    results: int
    heads: int
    others: Callable[[Sequence[Any]], tuple[Any, ...]]


def nothing(args: Sequence[Any]) -> tuple[Any, ...]:
    """No other results."""
    return ()


def _without_dropout(args: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Seed, offset and weights of a call without dropout."""
    query: Tensor = args[0]
    state = torch.empty(2, dtype=torch.uint64, device=query.device)  # nothing reads it, as in PyTorch's kernel
    return state, torch.empty((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _of_dense(args: Sequence[Any]) -> tuple[Any, ...]:
    query, key = args[:2]
    return None, None, query.shape[2], key.shape[2], *_without_dropout(args)


CUDA = (
    Replaced(_aten._scaled_dot_product_flash_attention.default, 2, -3, _of_dense),
    Replaced(_aten._scaled_dot_product_flash_attention_backward.default, 3, -3, nothing),
    Replaced(_aten._flash_attention_forward.default, 2, -2, _without_dropout),
    Replaced(_aten._flash_attention_backward.default, 3, -2, nothing),
)


class Handle:
    """Keeps the functions where they are until `remove`."""

    def __init__(self, library: Library) -> None:
        self._library: Library | None = library

    def remove(self) -> None:
        """PyTorch's kernels are called again."""
        self._library = None


def activate() -> Handle:
    """Put our functions in front of PyTorch's kernels for CUDA."""
    return in_front("CUDA", CUDA)


def in_front(device: str, operators: Sequence[Replaced]) -> Handle:
    """Put our functions in front of the kernels of operators for a device, "CUDA" or "CPU"."""
    library = Library("aten", "IMPL", device)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Warning only once for all operators", UserWarning
        )  # that is what is asked for
        for replaced in operators:
            name = replaced.op._schema.name.removeprefix("aten::")
            library.impl(name, _Kernel(replaced, get_kernel(replaced.op, device)), device, with_keyset=True)
    return Handle(library)


_inside: ContextVar[bool] = ContextVar("dash_inductor_inside_of_flash", default=False)
"""Whether one of our functions is running: the operators that it calls are PyTorch's."""


class _Kernel:
    """The function in front of a kernel."""

    def __init__(self, replaced: Replaced, original: Any) -> None:
        self._replaced, self._original = replaced, original
        self._names = [argument.name for argument in replaced.op._schema.arguments]

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _inside.get():
            return self._original.call_boxed(keys, *args, **kwargs)
        token = _inside.set(True)
        try:
            given = dict(zip(self._names, args, strict=False)) | kwargs
            if not _switch.is_enabled() or given.get("dropout_p") or given.get("return_debug_mask"):
                return self._original.call_boxed(keys, *args, **kwargs)
            return self._compiled_call(given)
        finally:
            _inside.reset(token)

    def _compiled_call(self, given: dict[str, Any]) -> tuple[Any, ...]:
        """The results of a call without dropout, from its arguments by their names."""
        varying = [value for value in given.values() if _varies(value)]
        constants = tuple((name, _VARIES if _varies(value) else value) for name, value in given.items())
        read = [given[name] for name in ("query", "key", "value")]
        sizes = tuple((tensor.shape[self._replaced.heads], tensor.shape[-1], tensor.shape[0] == 1) for tensor in read)
        with torch.no_grad(), DETERMINISTIC:
            found = _compiled(self._replaced, constants, sizes, read[0].dtype, read[0].device)(*varying)
        return (*found, *self._replaced.others(read))


_VARIES = "varies"


def _varies(value: object) -> bool:
    """Whether an argument is no constant of the compiled function: a tensor, or a length."""
    return isinstance(value, Tensor) or type(value) is int


@functools.cache
def _compiled(
    replaced: Replaced, constants: tuple[tuple[str, Hashable], ...], *traits: Hashable
) -> Callable[..., tuple[Tensor, ...]]:
    """The compiled function of an operator and of all that does not vary between its calls; see `attention._compiled`.

    Args:
        constants: the arguments by their names; `_VARIES` for those that the function takes.
        traits: more that calls of one function have in common.
    """
    op, results = replaced.op, replaced.results
    keywords = {argument.name for argument in op._schema.arguments if argument.kwarg_only}

    def flash_attention(*varying: Any) -> tuple[Tensor, ...]:
        rest = iter(varying)
        given = [(name, next(rest) if value is _VARIES else value) for name, value in constants]
        args = [value for name, value in given if name not in keywords]
        found: tuple[Tensor, ...] = op(*args, **{name: value for name, value in given if name in keywords})[:results]
        return found

    name = hashlib.sha256(f"{op} {constants} {traits}".encode()).hexdigest()[:8]
    flash_attention.__code__ = flash_attention.__code__.replace(co_name=f"flash_attention_{name}")
    return torch.compile(flash_attention, fullgraph=True, options={"deterministic": True})
