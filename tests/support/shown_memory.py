"""What a program sees of the memory of a graph's results, and what becomes of gradients when it writes there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .rewriting import NOTICED

Program = Callable[..., Any]
"""Takes tensors; gives a tensor or a tuple of tensors."""
Write = Callable[[Tensor], None]


def _in_place(tensor: Tensor) -> None:
    """Autograd counts the write; it does not ask whether the result is a view, which depends on who runs a graph."""
    _fill(tensor.detach())


def _past_autograd(tensor: Tensor) -> None:
    _fill(tensor.data)


def _fill(tensor: Tensor) -> None:
    """Change every element, of an index to a valid one."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    elif tensor.is_floating_point():
        tensor.mul_(-2).add_(3)
    else:
        tensor.zero_()


WRITES: dict[str, Write] = {"in place": _in_place, "through .data": _past_autograd}


@dataclass(frozen=True)
class Layout:
    """What is seen of one result: it, and the numbers of the results and inputs (negative) that share its memory.

    Strides of dimensions of one element count as 0.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    storage: int
    shared: frozenset[int]


def results_of(program: Program, tensors: Sequence[Tensor]) -> list[Tensor]:
    found = program(*tensors)
    return [each for each in (found if isinstance(found, (tuple, list)) else (found,)) if isinstance(each, Tensor)]


def layouts(program: Program, tensors: Sequence[Tensor]) -> list[Layout]:
    """The layouts of a program's results."""
    given = copies(tensors)
    results = results_of(program, given)
    places = dict(enumerate(results))
    places |= {-1 - number: tensor for number, tensor in enumerate(given)}
    return [
        Layout(
            result.shape,
            tuple(stride if size > 1 else 0 for size, stride in zip(result.shape, result.stride(), strict=True)),
            result.storage_offset(),
            result.untyped_storage().nbytes(),
            frozenset(n for n, other in places.items() if _memory(other) == _memory(result) and other.numel()),
        )
        for result in results
    ]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with the same elements, strides, and gaps, in memory of their own."""
    return [_copy(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors]


def _copy(tensor: Tensor) -> Tensor:
    """`clone` would close gaps, and write out what is expanded."""
    storage = tensor.untyped_storage().clone()
    with torch.no_grad():
        return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload, no-any-return]


def has_overlaps(tensor: Tensor) -> bool:
    """Whether a dimension of a tensor is expanded."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def after(program: Program, tensors: Sequence[Tensor], place: int, write: Write) -> list[Tensor] | str:
    """The gradients of tensors after a write to a result, or with a negative place to an input, between a forward and
    its backward; or the kind of autograd's error where it notices the write.
    """
    given = copies(tensors)
    results = results_of(program, given)
    wanted = [tensor for tensor in given if tensor.requires_grad]
    ends = [result for result in results if result.requires_grad]
    ones = [torch.linspace(0.5, 1.5, end.numel(), dtype=end.dtype).reshape(end.shape) for end in ends]
    try:
        write(results[place] if place >= 0 else given[-1 - place])
        return [t.detach() for t in torch.autograd.grad(ends, wanted, ones, allow_unused=True) if t is not None]
    except RuntimeError as error:
        if not any(message in str(error) for message in (*NOTICED, "a leaf Variable that requires grad")):
            raise
        return "noticed"


def same(found: list[Tensor] | str, expected: list[Tensor] | str) -> bool:
    """Whether both are errors, or gradients that differ by no more than sums in another order explain."""
    if isinstance(found, str) or isinstance(expected, str):
        return isinstance(found, str) and isinstance(expected, str)
    return len(found) == len(expected) and all(
        torch.allclose(a.double(), b.double(), atol=1e-4, rtol=1e-4, equal_nan=True)
        for a, b in zip(found, expected, strict=True)
    )
