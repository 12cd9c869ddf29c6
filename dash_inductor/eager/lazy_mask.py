"""A mask tensor that has no elements until a PyTorch operator reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..upstream.tensors import tensor_without_data, without_torch_function
from .mask_functions import MaskProgram

_aten = torch.ops.aten
_SAME = frozenset({_aten.detach.default, _aten.alias.default})
"""Operators that return the mask unchanged."""
_LISTS = frozenset({Tensor.numpy, Tensor.tolist})
"""Tensor methods that read elements without calling an operator."""


class LazyMask(Tensor):
    """A bool mask [batch, 1, queries, keys] that is computed from positions and a few tensors when it is read.

    The attention of this package never reads the elements: it evaluates `program` inside the graph that it compiles.
    Other operators read a tensor with the computed elements, so results of view operators share no memory with
    the mask.

    Args:
        program: computes the mask.
        operands: the tensors that `program` reads.
        shape: [batch, 1, queries, keys].
        device: the device on which positions are computed.
    """

    program: MaskProgram
    operands: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    """The shape as a tuple, which is faster to read than `shape`."""

    @staticmethod
    def __new__(
        cls: type[LazyMask],
        program: MaskProgram,
        operands: tuple[Tensor, ...],
        shape: Sequence[int],
        device: torch.device,
    ) -> LazyMask:
        queries, keys = shape[2:]
        strides = (queries * keys, queries * keys, keys, 1)
        mask: LazyMask = tensor_without_data(cls, shape, strides, torch.bool, device)
        mask.program, mask.operands, mask.sizes = program, operands, tuple(shape)
        return mask

    def dense(self) -> Tensor:
        """Computes the mask as an ordinary bool tensor."""
        return self.program(self.operands, self.shape, self.device)

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor's has arguments for the elements
        return f"LazyMask({list(self.shape)}, {self.device}, {self.program})"

    def _stable_hash_for_caching(self) -> str:
        """The text by which PyTorch's compile caches compare masks."""
        return str(self.program)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies the mask as an ordinary tensor."""
        return self.dense().contiguous().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dense().contiguous()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__setitem__ and isinstance(args[0], LazyMask):
            raise _not_written_to()
        with without_torch_function():
            return func(*(_dense(args) if func in _LISTS else args), **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch's own is a function of a class without one
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _SAME:
            mask: LazyMask = args[0]
            return cls(mask.program, mask.operands, mask.shape, mask.device)
        given = kwargs or {}
        if func._schema.is_mutable and isinstance(args[0], LazyMask):  # type: ignore[attr-defined]
            raise _not_written_to()
        if func is _aten._to_copy.default and given.get("device") and given.get("dtype", torch.bool) == torch.bool:
            mask, device = args[0], torch.device(given["device"])
            return cls(mask.program, tuple(operand.to(device) for operand in mask.operands), mask.shape, device)
        return func(*_dense(args), **_dense(given))

    def __tensor_flatten__(self) -> tuple[list[str], tuple[MaskProgram, torch.device]]:
        for number, operand in enumerate(self.operands):
            setattr(self, f"operand_{number}", operand)
        return [f"operand_{number}" for number in range(len(self.operands))], (self.program, self.device)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], context: tuple[MaskProgram, torch.device], shape: Sequence[int], strides: Any
    ) -> LazyMask:
        operands = tuple(inner[f"operand_{number}"] for number in range(len(inner)))
        return LazyMask(context[0], operands, shape, context[1])


def _not_written_to() -> TypeError:
    return TypeError("a mask of dash_inductor has no elements to write to: write to a copy, `mask.clone()`")


def _dense(value: Any) -> Any:
    """The arguments of an operator, with every LazyMask replaced by its elements."""
    if isinstance(value, LazyMask):
        return value.dense()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_dense, value))
    if isinstance(value, dict):
        return {name: _dense(item) for name, item in value.items()}
    return value
