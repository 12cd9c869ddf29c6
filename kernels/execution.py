"""How the kernels of a family are compiled and run: the half of `family` that needs torch and Triton."""

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
"""grad_out, query, key, value, out and log-sum-exp, shaped as `operators.attention` says."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""dq, dk and dv."""
Results = tuple[Tensor, Tensor]
"""Output and log-sum-exp."""
ReadyForward = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor]], Results | None]
"""(query, key, value, extras) -> results, of tensors with known dtypes, shapes, strides and devices; None where their
addresses, or the current device, are such that only `Execution.forward` can run."""
ReadyBackward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[Tensor]], Gradients | None]
"""The same of a backward, with the arguments of `Tensors` before the extras."""
Compiled = Callable[[Site, Plan, torch.device], Iterator[Any]]
"""Triton's compiled kernels for a site on a CUDA device, compiled now."""


def _usual_q_lens(site: Site, usual: int) -> tuple[int, ...]:
    return (usual,)


@dataclass(frozen=True)
class Execution:
    """The functions that run a family's kernels.

    Args:
        backward, forward: run them outside of Inductor; the backward is given the site's name, the forward its tiles.
        backward_with_delta: as `backward`, and delta, see `operators.attention`.
        compiled, compiled_forward: the kernels of the backward, and of the forward.
        templates: Inductor lowers them from templates; else it calls the operator, which runs `backward`.
        q_lens: (site, a usual number of queries) -> numbers of queries for which the site needs different forward
            kernels.
        ready_forward, ready_backward: the function that runs a call of tensors like these, with as little time of the
            host as there may be.  They, or what they return, are None where `forward` and `backward` are all there is.
    """

    backward: Callable[[Tensors, Sequence[Tensor], Call, Plan, str], Gradients]
    backward_with_delta: Callable[[Tensors, Sequence[Tensor], Call, Plan, str], tuple[Gradients, Tensor]]
    forward: Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], Call, Tiles], Results]
    compiled: Compiled
    compiled_forward: Compiled
    templates: bool = False
    q_lens: Callable[[Site, int], tuple[int, ...]] = _usual_q_lens
    ready_forward: Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], Call, Tiles], ReadyForward | None] | None = None
    ready_backward: Callable[[Tensors, Sequence[Tensor], Call, Plan, str], ReadyBackward | None] | None = None
