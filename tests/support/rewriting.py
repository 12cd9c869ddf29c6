"""Programs that write to a tensor between a forward and its backward: what becomes of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = list[Tensor]
OUTPUT = "the output"
NOTICED = (
    "modified by an inplace operation",
    "is a view and its base or another view of its base has been modified inplace",
)


def gradients_after(
    function: Callable[..., Tensor], tensors: dict[str, Tensor], written: str | None, *, twice: bool = False
) -> Gradients | str:
    """Gradients of tensors that want them; `written`, a tensor's name or `OUTPUT`, is written to before the backward.

    Args:
        twice: run the backward once before that, with `retain_graph`.

    Returns:
        The gradients, or autograd's message where it notices that a tensor was written to.
    """
    given = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in tensors.items()}
    wanted = [t for t in given.values() if t.requires_grad]
    output = function(*given.values())
    grad_out = torch.linspace(0, 1, output.shape[-1], device=output.device, dtype=output.dtype).expand_as(output)
    if twice:
        torch.autograd.grad(output, wanted, grad_out, retain_graph=True)
    try:
        if written is not None:
            write(output if written == OUTPUT else given[written])
        return list(torch.autograd.grad(output, wanted, grad_out))
    except RuntimeError as error:
        if not any(message in str(error) for message in NOTICED):
            raise
        return str(error)


def write(tensor: Tensor) -> None:
    """Change every element, past autograd, as an optimizer or a data loader does."""
    with torch.no_grad():
        if tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.add_(3)


def differs(found: Any, expected: Gradients) -> bool:
    """Whether gradients are others than those expected, by more than sums in another order explain."""
    tolerance = 2e-2 if expected[0].dtype != torch.float32 else 1e-4
    pairs = zip(found, expected, strict=True)
    return any((a - b).abs().max() > tolerance * b.abs().max() for a, b in pairs)
