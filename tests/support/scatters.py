"""Programs whose forwards or backwards scatter by tensors of indices, as layers of experts and losses have them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EXPERTS = 16


def chosen(x: Tensor, top: int) -> Tensor:
    """The experts of each row of x, [rows, top]."""
    return x[:, :EXPERTS].float().topk(top, -1).indices


def wide(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 where a reference is computed."""
    return x if x.dtype == torch.float64 else x.float()


def grouped(x: Tensor, top: int = 4) -> Tensor:
    """A layer of experts as transformers has it: rows sorted by expert, their inverse stored, results summed."""
    experts = chosen(x, top)
    weights = wide(x)[:, :EXPERTS].softmax(-1).gather(-1, experts).to(x.dtype)
    _, order = torch.sort(experts.reshape(-1))
    rows = torch.tanh(x[order // top]) * weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return rows[inverse].view(x.shape[0], top, -1).sum(1)


def combined(x: Tensor, top: int = 4) -> Tensor:
    """A layer of experts as torchtitan has it: rows gathered and added to a tensor by expanded indices."""
    order = torch.argsort(chosen(x, top).view(-1), stable=True)
    index = (order // top).reshape(-1, 1).expand(-1, x.shape[1])
    return (2 * x).scatter_add(0, index, torch.tanh(torch.gather(x, 0, index)))


def unsorted(x: Tensor, top: int = 4) -> Tensor:
    """Results stored in the order of tokens, and tokens named by a second gather."""
    order = torch.argsort(chosen(x, top).view(-1), stable=True)
    tokens = torch.arange(x.shape[0], device=x.device).unsqueeze(1).expand(-1, top).reshape(-1)
    out = torch.zeros(order.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    out[order] = torch.tanh(x[tokens[order]])
    return out.view(x.shape[0], top, -1).sum(1)


def truncated(x: Tensor) -> Tensor:
    """Some of the rows, in another order."""
    return torch.tanh(x[torch.argsort(x[:, 0].float(), stable=True)[: x.shape[0] // 2]])


def router(x: Tensor, top: int = 8) -> Tensor:
    """The probabilities of the chosen experts, once as `topk` gives them and once by a gather."""
    values, indices = x.float().topk(top, -1)
    return values.sigmoid() + wide(x).softmax(-1).gather(-1, indices)


def labelled(x: Tensor) -> Tensor:
    """Log-probabilities of labels, as losses of preferences and policies read them."""
    labels = (x.detach().float() * 1000).long().abs().sum(-1, keepdim=True) % x.shape[-1]
    return wide(x).log_softmax(-1).gather(-1, labels).squeeze(-1)


def last(x: Tensor) -> Tensor:
    """One row of each of several sequences."""
    sequences = x.view(8, -1, x.shape[-1])
    places = (sequences[:, :, 0] > 0).sum(1) - 1
    return sequences[torch.arange(8, device=x.device), places]


def ordered(x: Tensor) -> Tensor:
    """All elements of a line, sorted."""
    return wide(x).sort(dim=-1, stable=True).values * torch.arange(x.shape[-1], device=x.device)


def repeated(x: Tensor) -> Tensor:
    """Indices of a line that may be equal."""
    indices = (x.detach()[:, :5].float() * 7).long().abs() % 3
    return torch.tanh(x).gather(-1, indices)


PERMUTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (grouped, combined, unsorted, truncated, ordered)
}
FEW: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (router, labelled, last, repeated)}
PROGRAMS = PERMUTATIONS | FEW


def step(run: Callable[[Tensor], Tensor], x: Tensor, *, dynamic: bool = False) -> list[Tensor]:
    """The output and the gradient, for one fixed gradient of the output.

    Args:
        dynamic: the number of rows is dynamic.
    """
    leaf = x.detach().requires_grad_()
    if dynamic:
        torch._dynamo.mark_dynamic(leaf, 0)
    out = run(leaf)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(out, leaf, grad.to(out.device, out.dtype))
    return [out.detach(), gradient]
