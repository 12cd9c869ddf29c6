"""`Execution`: the functions that compile and run a family's kernels.

This is the half of a family that needs torch and Triton; `family` has the half that needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..model.call import Call
from ..model.plan import Plan, Tiles
from ..model.site import Site

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""(grad_out, query, key, value, out, log-sum-exp), with the shapes that `operators.attention` documents."""
Gradients = Sequence[Tensor]
"""The results of a backward, dq, dk, dv, ..., as `Call.results` names them."""
Results = tuple[Tensor, Tensor]
"""(output, log-sum-exp)."""
ReadyForward = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor]], Results | None]
"""(query, key, value, extras) -> results: a cached launch plan for tensors of fixed layouts, dtypes and devices.

It returns None if the addresses of the tensors (their alignment) or the current device do not fit the plan; the caller
then runs `Execution.forward`.
"""
ReadyBackward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[Tensor]], Gradients | None]
"""The counterpart of `ReadyForward` for a backward: the six tensors of `Tensors`, then the extras, -> gradients."""
Compiled = Callable[[Site, Plan, torch.device], Iterator[Any]]
"""(site, plan, device) -> Triton's compiled kernels for the site, compiled while the iterator is consumed."""


def _usual_q_lens(site: Site, usual: int) -> tuple[int, ...]:
    return (usual,)


@dataclass(frozen=True)
class Execution:
    """The functions that compile and run a family's kernels.

    Args:
        backward, forward: run the kernels outside of Inductor.  The backward takes the site's name as last argument,
            the forward its tiles.
        compiled, compiled_forward: compile the kernels of the backward, and of the forward.
        templates: whether Inductor lowers the kernels from templates.  If not, the graph calls the operator, which runs
            `backward`.
        q_lens: (site, typical number of queries) -> the numbers of queries for which the site needs different forward
            kernels.
        ready_forward, ready_backward: return a cached launch plan for tensors like the given ones, which needs less
            host time.  The function, or its result, is None where only `forward` and `backward` can run.
    """

    backward: Callable[[Tensors, Sequence[Tensor], Call, Plan, str], Gradients]
    forward: Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], Call, Tiles], Results]
    compiled: Compiled
    compiled_forward: Compiled
    templates: bool = False
    q_lens: Callable[[Site, int], tuple[int, ...]] = _usual_q_lens
    ready_forward: Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], Call, Tiles], ReadyForward | None] | None = None
    ready_backward: Callable[[Tensors, Sequence[Tensor], Call, Plan, str], ReadyBackward | None] | None = None
