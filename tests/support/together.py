"""The operators through Inductor: many calls in one graph, whose kernels are compiled side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile

from dash_inductor import lowering
from dash_inductor.model import Order, Plan
from dash_inductor.operators import attention as ops

from .attention import Attention, Gradients
from .calls import BSHD
from .hopper_forward import rounded_under
from .keyed import KeyedAttention

Results = tuple[Tensor, ...]
"""out and log-sum-exp, and behind them dq, dk and dv where there is a backward."""

Arguments = tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor | None]
"""q, k, v, what the mask reads, and do where there is a backward."""


@contextmanager
def side_by_side() -> Iterator[None]:
    """Inductor compiles the kernels of a graph in processes of its own, as it does outside of these tests."""
    with inductor_config.patch(compile_threads=max(2, min(16, os.cpu_count() or 2))):
        AsyncCompile.warm_pool()
        AsyncCompile.wait_pool_ready()  # a graph that comes earlier is compiled one kernel after the other
        yield


class Together:
    """The forwards of several problems as one compiled graph, with the backwards of these forwards if they are wanted.

    Calling it runs the graph on problems with the masks and scales that it was made for.  Nothing else can answer: a
    call that Dynamo does not compile is an error.

    Args:
        plans: one per problem.
        orders: of the outputs' dimensions, one per problem; BSHD by default.
        dynamic: those dimensions of q, k, v and their gradients that the graph does not know: 0, 2, or both.
    """

    def __init__(
        self, problems: Sequence[KeyedAttention], plans: Sequence[Plan], *, with_backward: bool = False,
        orders: Sequence[Order] | None = None, dynamic: Sequence[int] = (),
    ) -> None:  # fmt: skip
        lowering.register()
        self._dynamic, self._with_backward = dynamic, with_backward
        orders = [BSHD] * len(problems) if orders is None else orders
        calls = [str(replace(p.spec(1), orders=(order,))) for p, order in zip(problems, orders, strict=True)]
        backward_calls, texts = [str(p.spec(3)) for p in problems], [str(plan) for plan in plans]

        def run(tensors: list[Arguments]) -> list[Results]:
            results: list[Results] = []
            for i, (q, k, v, extras, do) in enumerate(tensors):
                out, lse = ops.attention_forward(q, k, v, extras, calls[i], texts[i], "test")
                if do is None:
                    results.append((out, lse))
                else:
                    gradients = ops.attention_backward(
                        do, q, k, v, out, lse, extras, backward_calls[i], texts[i], "test"
                    )  # fmt: skip
                    results.append((out, lse, *gradients))
            return results

        self._run = torch.compile(run, dynamic=False, fullgraph=True)

    def __call__(self, problems: Sequence[KeyedAttention]) -> list[Results]:
        return self._run([self._arguments(p) for p in problems])

    def _arguments(self, p: KeyedAttention) -> Arguments:
        # tensors of this call's own: what is said of their dimensions stays with them
        do = p.do.detach() if self._with_backward else None
        q, k, v, extras = p.q.detach(), p.k.detach(), p.v.detach(), [vector.detach() for vector in p.extras]
        for dim in self._dynamic:
            for t in (q, k, v, do):
                if t is not None:
                    torch._dynamo.maybe_mark_dynamic(t, dim)
            for vector in extras:
                torch._dynamo.maybe_mark_dynamic(vector, min(dim, 1))
        return q, k, v, extras, do


def dense(p: KeyedAttention) -> Attention:
    """The same problem for helpers that know neither vectors of keys nor segments."""
    assert p.keys is None
    assert p.segments is None
    return Attention(p.q, p.k, p.v, p.do, p.mask, p.scale)


def rounded(p: KeyedAttention, out: Tensor, lse: Tensor) -> tuple[Tensor, Gradients]:
    """out, and the gradients that belong to `out` and `lse`, with the roundings that any flash kernel makes.

    Probabilities and their gradients are rounded to the inputs' dtype before they enter a matmul, and the results are.
    """
    dtype, keep = p.q.dtype, p.keep()[:, None]
    q, do, o = (t.float() for t in (p.q, p.do, out))
    k, v = (t.float().repeat_interleave(p.group, 1) for t in (p.k, p.v))
    s = q @ k.mT * p.scale
    weights = torch.where(keep, (s - torch.where(lse.isfinite(), lse, 0.0)[..., None]).exp(), 0.0)
    ds = weights * (do @ v.mT - (o * do).sum(-1, keepdim=True))
    ds = ds.to(dtype).float()
    dk, dv = ds.mT @ q * p.scale, weights.to(dtype).float().mT @ do
    dk, dv = (t.unflatten(1, (-1, p.group)).sum(2) for t in (dk, dv))
    gradients = (ds @ k * p.scale).to(dtype), dk.to(dtype), dv.to(dtype)
    return rounded_under(keep, p.q, p.k, p.v, p.scale), gradients
