"""The operators of the graph, `dash::attention_forward` and `dash::attention_backward`: schemas, fakes, eager kernels.

Mask, plan and site are strings, so that every graph dump and all generated code shows what was decided.  Importing this
module imports torch and defines the operators; Inductor's lowerings are in `dash_inductor.lowering`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from .errors import ArgumentError, DashError

_lib = torch.library.Library("dash", "DEF")
_lib.define(
    "attention_forward(Tensor query, Tensor key, Tensor value, str mask, float scale, int[] out_order, str plan, "
    "str site) -> (Tensor out, Tensor logsumexp)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_lib.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    "str mask, float scale, int[] dq_order, int[] dk_order, int[] dv_order, str plan, str site) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)

attention_forward = torch.ops.dash.attention_forward.default
attention_backward = torch.ops.dash.attention_backward.default


def empty_ordered(size: Sequence[int | torch.SymInt], order: Sequence[int], like: Tensor) -> Tensor:
    """A dense tensor of `size` whose dimensions, from the largest stride to the smallest, are `order`."""
    if sorted(order) != list(range(len(size))):
        raise ArgumentError("order", list(order), f"a permutation of 0..{len(size) - 1}")
    inverse = [0] * len(order)
    for place, dim in enumerate(order):
        inverse[dim] = place
    return like.new_empty([size[d] for d in order]).permute(inverse)


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: str, scale: float, out_order: list[int], plan: str, site: str
) -> tuple[Tensor, Tensor]:
    out = empty_ordered([*query.shape[:3], value.shape[3]], out_order, query)
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _fake_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: str,
    scale: float,
    dq_order: list[int],
    dk_order: list[int],
    dv_order: list[int],
    plan: str,
    site: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        empty_ordered(query.shape, dq_order, query),
        empty_ordered(key.shape, dk_order, key),
        empty_ordered(value.shape, dv_order, value),
    )


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: str, scale: float, out_order: list[int], plan: str, site: str
) -> tuple[Tensor, Tensor]:
    from .kernels import forward

    out, logsumexp = forward.run(query, key, value, mask, scale, plan)
    return _with_order(out, out_order), logsumexp


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: str,
    scale: float,
    dq_order: list[int],
    dk_order: list[int],
    dv_order: list[int],
    plan: str,
    site: str,
) -> tuple[Tensor, Tensor, Tensor]:
    orders = (dq_order, dk_order, dv_order)
    if plan.startswith("hopper/") and query.is_cuda:
        from .kernels.hopper import launch

        unit_stride = [order if order[-1] == 3 else [0, 1, 2, 3] for order in orders]
        gradients = launch.backward(grad_out, query, key, value, out, logsumexp, mask, scale, unit_stride, plan)
        if unit_stride == list(orders):
            return gradients
        dq, dk, dv = map(_with_order, gradients, orders)
        return dq, dk, dv
    from .kernels import reference

    dq, dk, dv = reference.backward(grad_out, query, key, value, out, logsumexp, mask, scale, plan)
    return _with_order(dq, dq_order), _with_order(dk, dk_order), _with_order(dv, dv_order)


def _with_order(tensor: Tensor, order: list[int]) -> Tensor:
    """`tensor` if its strides are those of a dense tensor with this order of dimensions, else a copy that has them."""
    wanted = empty_ordered(tensor.shape, order, tensor.new_empty(0, device="meta")).stride()
    if tensor.stride() == wanted:
        return tensor
    return empty_ordered(tensor.shape, order, tensor).copy_(tensor)


def _not_differentiable(ctx: object, *grads: Tensor) -> None:
    raise DashError(
        "dash::attention_forward and dash::attention_backward stand in compiled graphs, where forward and backward are "
        "already separate; autograd cannot differentiate through them"
    )


for _name, _fake in (("attention_forward", _fake_forward), ("attention_backward", _fake_backward)):
    torch.library.register_fake(f"dash::{_name}", _fake, lib=_lib)
    torch.library.register_autograd(f"dash::{_name}", _not_differentiable, lib=_lib)


@register_flop_formula(torch.ops.dash.attention_forward)
def _forward_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, out_shape: object = None) -> int:
    """As PyTorch counts its own attention, masks ignored; the partitioner weighs recomputation by it."""
    return int(sdpa_flop_count(query, _as_many_heads(query, key), _as_many_heads(query, value)))


@register_flop_formula(torch.ops.dash.attention_backward)
def _backward_flops(
    grad_out: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: object, out_shape: object = None
) -> int:
    return int(sdpa_backward_flop_count(grad_out, query, _as_many_heads(query, key), _as_many_heads(query, value)))


def _as_many_heads(query: torch.Size, other: torch.Size) -> torch.Size:
    return torch.Size((other[0], query[1], *other[2:]))


# Eager calls run the Hopper kernel where the plan says so, else the reference executor; compiled calls on CUDA are
# lowered to the plan's kernels.
for _device in ("CPU", "CUDA"):
    _lib.impl("attention_forward", _forward, _device)
    _lib.impl("attention_backward", _backward, _device)
