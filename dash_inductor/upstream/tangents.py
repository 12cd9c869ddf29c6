"""Zeros for results of a compiled forward that get no gradient, for its backward.

Autograd makes them in memory that it fills with NaN first, under deterministic algorithms: a result such as logits,
which a program does not differentiate beside the loss, is written twice.  Zeros write all of their memory.  Many zeros
need none, where the backward only reads them: see `zero_pages`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import zero_pages
from .fill_uninitialized_memory import without_fill


def supply_zeros(compiled: Callable[..., Any], only_reads: Callable[[Any], bool]) -> None:
    """Let the backward of a compiled graph make such zeros, without the fill, in the place of autograd.

    Nothing changes unless `compiled` is the ``apply`` of AOTAutograd's function of a graph, all of whose tensors are
    plain ones.

    Args:
        only_reads: whether a compiled backward, None before its first call, is known to do no more with its inputs than
            to read them on their device.
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
        if missing:  # nothing here keeps one of the zeros: a backward may free what it has read
            shared = _fill_in(found, missing, ctx._input_metadata, only_reads(function.compiled_bw))
        results = backward(ctx, found) if is_boxed else backward(ctx, *found)
        return _owned(results) if shared else results

    def key_of(ctx: Any) -> Any:
        """Compiled autograd asks for it first; it traces the backward by itself, and leaves zeros to autograd."""
        ctx.set_materialize_grads(True)
        return key(ctx)

    function.forward = staticmethod(forward_for_given_gradients)
    function.backward = staticmethod(backward_with_zeros)
    function._compiled_autograd_key = staticmethod(key_of)


def _differentiable(ctx: Any, results: Sequence[Any]) -> list[int]:
    """The places of results for which autograd would make zeros."""
    others = {id(result) for result in ctx.non_differentiable or ()}
    return [place for place, x in enumerate(results) if isinstance(x, Tensor) and id(x) not in others]


def _fill_in(gradients: list[Any], missing: Sequence[int], metadata: Sequence[Any], only_reads: bool) -> bool:
    """Put zeros in the missing places; whether some of them cannot be written."""
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
    """The results of a backward, those copied that are zeros which it was given: a program may write to gradients."""
    return tuple([x.clone() if isinstance(x, Tensor) and zero_pages.is_read_only(x) else x for x in results])


@without_fill
def _zeros(metadata: Sequence[Any]) -> list[Tensor]:
    return [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in metadata]
