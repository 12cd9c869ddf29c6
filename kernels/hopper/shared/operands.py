"""Turns the optional operands of a call (`model.operands.OPERANDS`), such as sinks, into arguments of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import ArgumentError
from ....model.attention_spec import AttentionSpec
from ....model.operands import OPERANDS
from ....model.traits import Traits
from ...common.arguments import Group
from ...common.call_launches import Address
from .tensors import broadcast_strides


class Parameter(NamedTuple):
    """A kernel parameter for an optional operand.

    Attributes:
        operand: the name of the operand in `OPERANDS`.
        group: the argument group: the operand's address, its `OperandKind.numbers`, its strides along
            `OperandKind.axes`.
    """

    operand: str
    group: Group


Parameters = Mapping[str, Parameter]
"""The parameters of a kernel that take optional operands, by name."""


def types(parameters: Parameters, traits: Traits) -> dict[str, Group | None]:
    """Returns the argument group of each kernel parameter by name; None for an operand that the call does not have."""
    return {name: of.group if traits.reads(of.operand) else None for name, of in parameters.items()}


def values(
    parameters: Parameters, spec: AttentionSpec, extras: Sequence[Tensor], addresses: Mapping[int, Address]
) -> dict[str, tuple[Any, ...] | None]:
    """Returns the arguments of each kernel parameter by name; None for an operand that the call does not have.

    Args:
        extras: the operator's extras, the tensors that follow its fixed ones.
        addresses: the addresses of these tensors, by index.
    """
    found: dict[str, tuple[Any, ...] | None] = dict.fromkeys(parameters)
    for name, (operand, _) in parameters.items():
        part = spec.given.get(operand)
        if part is not None:
            kind, index = OPERANDS[operand], part.operand.index
            strides = broadcast_strides(extras[index]) if kind.axes else ()
            found[name] = addresses[index], *(getattr(part, number) for number in kind.numbers), *strides
    return found


def check(
    spec: AttentionSpec, extras: Sequence[Tensor], sizes: tuple[int, int, int, int], device: torch.device
) -> None:
    """Checks that the optional operands of a call have the shapes and dtypes of `OPERANDS`, on this device.

    Args:
        extras: the operator's extras, which contain the operands.
        sizes: batch, q heads, q_len and kv_len.

    Raises:
        ArgumentError: an operand has another shape, dtype or device.
    """
    of_axes = dict(zip(("b", "h", "q", "kv"), sizes, strict=True))
    for name, part in spec.given.items():
        if part.operand.index >= len(extras):
            raise ArgumentError(name, None, f"a tensor, the extra of index {part.operand.index}, for {spec}")
        kind, tensor = OPERANDS[name], extras[part.operand.index]
        wanted = tuple(of_axes[axis] for axis in kind.axes) or (1,)
        shape = tuple(tensor.shape)
        fits = len(shape) == len(wanted) and all(
            size == full or (size == 1 and kind.broadcasts) for size, full in zip(shape, wanted, strict=True)
        )
        if not fits or (tensor.dtype, tensor.device) != (getattr(torch, kind.dtype), device):
            allowed = f"{kind.dtype} {wanted}{', or of size 1,' if kind.broadcasts else ''} on {device}"
            raise ArgumentError(name, (tensor.dtype, shape, str(tensor.device)), allowed)
