"""`Execution`: the functions that compile and run the kernels of a kernel family.

This is the half of a family that needs torch and Triton; `family` has the half that needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..model.attention_spec import AttentionSpec
from ..model.plan import Plan
from ..model.site import Site

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""(grad_out, query, key, value, out, log-sum-exp), with the shapes that `operators.attention` documents."""
Gradients = Sequence[Tensor]
"""The results of a backward, dq, dk, dv, ..., as `AttentionSpec.results` names them."""
Results = tuple[Tensor, Tensor]
"""(output, log-sum-exp)."""
Run = Callable[[Sequence[Any]], Any]
"""A function (arguments of the operator) -> results: runs the calls whose tensors have certain layouts, dtypes and
devices.

The arguments are the tensors (query, key and value of a forward, `Tensors` of a backward), the extras, and the
operator's text arguments, which are not read: these and all else that a call depends on were given when the function
was prepared, so that a call needs little host time.  Results have the operator's shapes, and the layouts of
`AttentionSpec.orders`.
"""
Compiled = Callable[[Site, Plan, torch.device], Iterator[Any]]
"""(site, plan, device) -> Triton's compiled kernels for the site, compiled while the iterator is consumed."""


def _usual_q_lens(site: Site, usual: int) -> tuple[int, ...]:
    return (usual,)


@dataclass(frozen=True)
class Execution:
    """The functions that compile and run a family's kernels.

    Args:
        backward, forward: functions of (tensors, extra tensors, spec, plan, site's name).  They return the function
            that runs this call outside of Inductor, for any tensors with the layouts of those given.
        compiled, compiled_forward: functions of (site, plan, device).  They compile the kernels of the backward, and of
            the forward, and return an iterator over Triton's compiled kernels.
        templates: whether Inductor lowers the kernels from templates.  If not, the graph calls the operator, which runs
            `backward`.
        q_lens: a function of (site, typical number of queries).  It returns numbers of queries, one for each variant of
            the forward kernels that the site may need.
    """

    backward: Callable[[Sequence[Tensor], Sequence[Tensor], AttentionSpec, Plan, str], Run]
    forward: Callable[[Sequence[Tensor], Sequence[Tensor], AttentionSpec, Plan, str], Run]
    compiled: Compiled
    compiled_forward: Compiled
    templates: bool = False
    q_lens: Callable[[Site, int], tuple[int, ...]] = _usual_q_lens
