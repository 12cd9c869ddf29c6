"""`scaled_dot_product_attention` in programs that are not compiled, computed by `attention`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..errors import ArgumentError
from ..upstream.attention import scaled_dot_product_attention as of_pytorch
from .attention import attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **more: Any,
) -> Tensor:
    """Computes what PyTorch's function of this name computes, deterministically, with its arguments.

    Args:
        query: [..., heads, queries, head dimension], or [batch, queries, head dimension]; float16, bfloat16 or float32
            to be replaced.
        key, value: [..., key heads, keys, head dimension], or [batch, keys, head dimension], with the dtype of query.
        attn_mask: bool, True for visible pairs, or floats that are added to the scores; broadcasts to
            [..., heads, queries, keys].
        dropout_p: the dropout probability of the attention weights.
        is_causal: whether query i sees only keys 0 to i; not together with `attn_mask`.
        scale: the factor of the scores, by default 1 / sqrt(head dimension).
        enable_gqa: not read: query heads may share key heads in any case.
        more: `window` and `softcap` of `attention`.

    Returns:
        [..., heads, queries, head dimension of the value].

    Raises:
        ArgumentError: `attn_mask` is not a tensor, or is given together with `is_causal`.
    """
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise ArgumentError("attn_mask", type(attn_mask).__name__, "a tensor")
    if attn_mask is not None and is_causal:
        raise ArgumentError("is_causal", is_causal, "False where attn_mask is given")
    tensors, mask = [query, key, value], attn_mask
    if query.dim() < 4:  # without heads
        tensors = [tensor.unsqueeze(-3) for tensor in tensors]
        mask = mask if mask is None or mask.dim() < 3 else mask.unsqueeze(-3)
    if query.dim() != 4:
        batch = tensors[0].shape[:-3]
        tensors = [tensor.reshape(-1, *tensor.shape[-3:]) for tensor in tensors]
        if mask is not None and mask.dim() > 3:
            mask = mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    q, k, v = tensors
    out = attention(q, k, v, mask, causal=is_causal, scale=scale, dropout=dropout_p, **more)
    return out if query.dim() == 4 else out.reshape(*query.shape[:-1], value.shape[-1])


class _InPlace(TorchFunctionMode):
    """A mode in which calls of PyTorch's `scaled_dot_product_attention` run the function above."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        function = scaled_dot_product_attention if func is of_pytorch else func
        return function(*args, **(kwargs or {}))


class _Entered(threading.local):
    """The modules of this thread whose forward runs in the mode, from the outermost inwards."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


_MODE, _ENTERED = _InPlace(), _Entered()


def is_in_place() -> bool:
    """Whether a call of PyTorch's `scaled_dot_product_attention` on this thread is computed here now."""
    return bool(_ENTERED.modules)


def _enter(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():  # in a graph, passes replace attention
        _MODE.__enter__()  # type: ignore[no-untyped-call]
        _ENTERED.modules.append(module)


def _leave(module: nn.Module, args: Any, result: Any) -> None:
    if not torch.compiler.is_compiling() and _ENTERED.modules[-1:] == [module]:
        _ENTERED.modules.pop()
        _MODE.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class Handles:
    """Keeps attention of modules in place of PyTorch's until `remove` is called."""

    def __init__(self, handles: Iterable[RemovableHandle]) -> None:
        self._handles = [*handles]

    def remove(self) -> None:
        """Lets the modules call PyTorch's function again."""
        while self._handles:
            self._handles.pop().remove()


def in_place(modules: Iterable[nn.Module]) -> Handles:
    """Lets the forwards of modules call `scaled_dot_product_attention` of this package in place of PyTorch's.

    Compiled forwards keep PyTorch's function, which is replaced in their graphs.  Copies of the modules do the same.
    """
    handles: list[RemovableHandle] = []
    for module in modules:
        handles += module.register_forward_pre_hook(_enter), module.register_forward_hook(_leave, always_call=True)
    return Handles(handles)
