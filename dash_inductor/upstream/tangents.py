"""Makes zeros for the backward of a compiled graph, for outputs of the forward that get no gradient.

Under deterministic algorithms, autograd makes them in memory that is first filled with NaN: the gradient of an output
such as logits, which the program returns in addition to the loss, is written twice.  The zeros made here are written
once.  Large ones need no memory if the backward only reads them: see `zero_pages`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import zero_pages
from .fill_uninitialized_memory import without_fill


def supply_zeros(compiled: Callable[..., Any], only_reads: Callable[[Any], bool]) -> None:
    """Makes a compiled graph's backward create the zeros for missing gradients itself, without autograd's NaN fill.

    Nothing changes unless `compiled` is the ``apply`` of the autograd function that AOTAutograd made for a graph
    without tensor subclasses.

    Args:
        compiled: the compiled forward.
        only_reads: returns whether a compiled backward (None before its first call) is known to only read its inputs,
            on their own device.
    """
    function = getattr(compiled, "__self__", None)
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        return
    if getattr(function, "maybe_subclass_metadata", compiled) is None and hasattr(function, "_compiled_autograd_key"):
        _supply(function, only_reads)


def _supply(function: Any, only_reads: Callable[[Any], bool]) -> None:
    forward, backward, key = function.forward, function.backward, function._compiled_autograd_key
    is_boxed = getattr(function, "boxed_grads_call", False)  # newer versions pass one list of gradients
    wanted: list[int] | None = None

    def forward_for_given_gradients(ctx: Any, *args: Any) -> Any:
        nonlocal wanted
        results = forward(ctx, *args)
        if wanted is None:  # the same in every call
            wanted = _differentiable(ctx, results)
        ctx.set_materialize_grads(False)
        return results

    def backward_with_zeros(ctx: Any, *gradients: Any) -> Any:
        found: list[Any] = gradients[0] if is_boxed else [*gradients]
        missing = [place for place in wanted or () if found[place] is None]
        shared = False
        if missing:  # no reference to the zeros is kept: a backward may free its inputs
            shared = _fill_in(found, missing, ctx._input_metadata, only_reads(function.compiled_bw))
        results = backward(ctx, found) if is_boxed else backward(ctx, *found)
        return _owned(results) if shared else results

    def key_of(ctx: Any) -> Any:
        """Replaces ``_compiled_autograd_key``: lets autograd materialize missing gradients, and returns the
        original key.

        Compiled autograd traces the backward, so here autograd has to make the zeros for outputs without a
        gradient.
        """
        ctx.set_materialize_grads(True)
        return key(ctx)

    function.forward = staticmethod(forward_for_given_gradients)
    function.backward = staticmethod(backward_with_zeros)
    function._compiled_autograd_key = staticmethod(key_of)


def _differentiable(ctx: Any, results: Sequence[Any]) -> list[int]:
    """The indices of outputs for which autograd would make zeros."""
    others = {id(result) for result in ctx.non_differentiable or ()}
    return [place for place, x in enumerate(results) if isinstance(x, Tensor) and id(x) not in others]


def _fill_in(gradients: list[Any], missing: Sequence[int], metadata: Sequence[Any], only_reads: bool) -> bool:
    """Replaces missing gradients by zeros; returns whether some of these are read-only."""
    shared = False
    if only_reads:
        for place in missing:
            about = metadata[place]
            gradients[place] = zero_pages.zeros(about.shape, about.dtype, about.device)
        still = [place for place in missing if gradients[place] is None]
        shared, missing = len(still) < len(missing), still
    for place, zeros in zip(missing, _zeros([metadata[place] for place in missing]), strict=True):
        gradients[place] = zeros
    return shared


def _owned(results: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a backward, with copies of read-only zeros among them, because programs may write to gradients."""
    return tuple([x.clone() if isinstance(x, Tensor) and zero_pages.is_read_only(x) else x for x in results])


@without_fill
def _zeros(metadata: Sequence[Any]) -> list[Tensor]:
    return [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in metadata]
