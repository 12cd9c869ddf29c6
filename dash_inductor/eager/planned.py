"""Plans an eager attention call from its tensors, as `passes.attention.sites` plans an attention in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import config
from ..graph.sizes import dense_order
from ..kernels.execution import Gradients, Results, Run, Tensors
from ..kernels.registry import execution
from ..model.attention_spec import AttentionSpec, Order
from ..model.mask import Band, Mask
from ..model.plan import Fallback, Plan
from ..model.reasons import Reason
from ..model.site import Site
from ..operators.attention import prepare_backward, prepare_forward
from ..passes.attention.checks import DTYPES
from ..planning import decide
from ..planning.planner import keeping
from ..upstream import arch, profiler, toolchain

RunForward = Callable[[Tensor, Tensor, Tensor], Results]
"""A function (query, key, value) -> (output, log-sum-exp)."""
RunBackward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Gradients]
"""A function (grad_out, query, key, value, out, logsumexp) -> gradients, with the arguments of `Tensors`."""


@dataclass(frozen=True)
class Asked:
    """A call of `scaled_dot_product_attention` that PyTorch dispatches to FlashAttention.

    Attributes:
        op: the name of the forward operator.
        query, key, value: [batch, heads, length, head dim]; key and value may have fewer heads.
        causal, scale: the arguments of these names.
        unusual: other arguments with values other than their defaults, in words.
    """

    op: str
    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    scale: float | None
    unusual: str = ""


@dataclass(frozen=True)
class Planned:
    """An eager attention call that will be replaced: its site, plan and architecture, as for a compiled graph.

    The site's attention spec has no `orders` (layouts of results), because these depend on the tensors of each call.
    """

    site: Site
    plan: Plan
    arch: str


def planned(asked: Asked) -> Planned | Fallback:
    """Plans an attention call; returns a `Fallback` with the reason if PyTorch's own kernel has to run."""
    query, key, value = asked.query, asked.key, asked.value
    device, tensors = query.device, (query, key, value)
    if device.type == "cpu" and config.cpu == "off":
        return Fallback(Reason.CPU_OFF)
    if not arch.is_supported(device):
        return Fallback(Reason.DEVICE, str(device))
    if asked.unusual:
        return Fallback(Reason.DROPOUT if "dropout" in asked.unusual else Reason.UNSUPPORTED_OP, asked.unusual)
    (batch, q_heads, q_len, head_dim), (_, kv_heads, kv_len, _) = query.shape, key.shape
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    if key.shape != (batch, kv_heads, kv_len, head_dim) or value.shape[:3] != key.shape[:3]:
        return Fallback(Reason.SHAPE, shapes)
    if 0 in (*query.shape, *value.shape) or q_heads % kv_heads:
        return Fallback(Reason.SHAPE, shapes)
    if len({tensor.dtype for tensor in tensors}) > 1 or query.dtype not in DTYPES:
        return Fallback(Reason.DTYPE, ", ".join(str(tensor.dtype) for tensor in tensors))
    if asked.causal and q_len != kv_len:
        return Fallback(Reason.CAUSAL_LENGTHS, f"query length {q_len}, key length {kv_len}")
    dtype = DTYPES[query.dtype]
    site = Site(
        device="cpu" if device.type == "cpu" else "cuda",
        dtype=dtype,
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=value.shape[3],
        spec=AttentionSpec(
            Mask(Band(0, None) if asked.causal else Band()),
            float(head_dim**-0.5) if asked.scale is None else asked.scale,
        ),
        allow_tf32=dtype == "float32" and arch.allow_tf32(device),
    )
    name = arch.arch_of(device)
    plan = decide(site, name, config.schedule, compiler=toolchain.numerics(), split_kv=config.split_kv)
    if isinstance(plan, Fallback):
        return plan
    if execution(plan.kernel).templates or execution(plan.forward).templates:
        family = plan.kernel if execution(plan.kernel).templates else plan.forward
        return Fallback(Reason.UNSUPPORTED_OP, f"the {family} kernels are compiled with a graph alone")
    return Planned(site, keeping(plan, asked.op) if config.forward == "keep" else plan, name)


def forward_of(found: Planned, tensors: tuple[Tensor, Tensor, Tensor], site: str) -> RunForward:
    """Returns the function that launches the forward of a planned attention for tensors with the layouts of these.

    Args:
        found: the plan.
        tensors: query, key and value.
        site: the name of the record.
    """
    spec = replace(found.site.spec, orders=_orders(tensors[:1]))
    return _named(prepare_forward(tensors, (), (str(spec), str(found.plan), site)), site)


def backward_of(found: Planned, tensors: Tensors, site: str) -> RunBackward:
    """Returns the function that launches the backward of a planned attention for tensors with the layouts of these.

    Args:
        found: the plan.
        tensors: grad_out, query, key, value, out and logsumexp.
        site: the name of the record.
    """
    spec = replace(found.site.spec, orders=_orders(tensors[1:4]))
    return _named(prepare_backward(tensors, (), (str(spec), str(found.plan), site)), site)


def _named(run: Run, site: str) -> Callable[..., Any]:
    """The function of tensors alone, which profiles show under the name of the site."""

    def named(*tensors: Tensor) -> Any:
        if not profiler.is_on():
            return run((*tensors, ()))
        with profiler.Span(f"dash_inductor {site}"):
            return run((*tensors, ()))

    return named


def _orders(tensors: Sequence[Tensor]) -> tuple[Order, ...]:
    """The dimension orders of results with the layouts of these tensors, as PyTorch's kernels choose them."""
    found = []
    for tensor in tensors:
        like = torch.empty_like(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
        found.append(dense_order(like.shape, like.stride()) or (0, 1, 2, 3))
    return tuple(found)
