"""Calls of the Hopper kernels, with the tensors of masks and operands apart; a layout is prepared once."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dash_inductor.kernels.common.layouts import as_given, heads_first
from dash_inductor.kernels.execution import Gradients, Results
from dash_inductor.kernels.hopper.backward import launch as backward_launch
from dash_inductor.kernels.hopper.backward.data import BackwardData
from dash_inductor.kernels.hopper.forward import launch as forward_launch
from dash_inductor.kernels.hopper.forward.data import ForwardData
from dash_inductor.model import AttentionSpec, Operand, Plan
from dash_inductor.operators.prepared import prepared

_known: dict[str, Callable[..., Any]] = {}


def forget() -> None:
    """Lets every layout be prepared anew."""

    def forward(tensors: Any, extras: Any, how: Any) -> Any:
        spec, ctas, _ = how
        return forward_launch.prepare(tensors, extras, spec, ctas=ctas)

    def backward(tensors: Any, extras: Any, how: Any) -> Any:
        return backward_launch.prepare(tensors, extras, *how)

    _known.update(forward=prepared(forward, 3), backward=prepared(backward, 6))


forget()


def forward(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, data: ForwardData | None = None, *,
    ctas: int | None = None, **operands: Tensor,
) -> Results:  # fmt: skip
    """(out, log-sum-exp) of a call, in the shapes that kernels have; operands: tensors of optional ones, by name."""
    spec, extras = given(spec, data, operands)
    tensors = [as_given(tensor, spec) for tensor in (query, key, value)]
    out, logsumexp = _known["forward"](*tensors, extras, spec, ctas, None)
    return *heads_first([out], spec), logsumexp  # type: ignore[return-value]  # two


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, spec: AttentionSpec,
    plan: Plan, data: BackwardData | None = None, *, site: str = "", **operands: Tensor,
) -> Gradients:  # fmt: skip
    """[dq, dk, dv, ...] of a call, in the shapes that kernels have; operands: tensors of optional ones, by name."""
    spec, extras = given(spec, data, operands)
    tensors = [as_given(tensor, spec) for tensor in (grad_out, query, key, value, out)]
    found = _known["backward"](*tensors, logsumexp, extras, spec, plan, site)
    return [*heads_first(found[:3], spec), *found[3:]]


def given(
    spec: AttentionSpec, data: ForwardData | BackwardData | None, operands: Mapping[str, Tensor]
) -> tuple[AttentionSpec, list[Tensor]]:
    """The call with its operands numbered from 0, and the operator's extras.

    What the mask reads of its own operands is in `data`; any other tensor stands for them.
    """
    spec = _renumbered(spec)
    count = 7
    made = [] if data is None else [tensor for tensor in data[:count] if tensor is not None]
    extras = [*made[:1] * len(spec.mask.operands), *(operands[name] for name in spec.given), *made]
    layout = spec.mask.varlen_layout
    if data is not None and layout is not None:
        assert data.token_counts is not None
        extras[layout.token_count.index] = data.token_counts
        if isinstance(data, BackwardData):
            assert data.token_offsets is not None
            extras[layout.token_offset.index] = data.token_offsets
    return spec, extras


@functools.cache
def _renumbered(spec: AttentionSpec) -> AttentionSpec:
    numbers = itertools.count()
    of_mask = {operand.index: next(numbers) for operand in spec.mask.operands}
    parts = {name: _numbered(part, {part.operand.index: next(numbers)}) for name, part in spec.given.items()}
    return dataclasses.replace(spec, mask=_numbered(spec.mask, of_mask), **parts)


def _numbered(part: Any, numbers: Mapping[int, int]) -> Any:
    """A part of a call with its operands numbered anew."""
    if isinstance(part, Operand):
        return Operand(numbers[part.index])
    if isinstance(part, tuple):
        return tuple(_numbered(each, numbers) for each in part)
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    fields = {field.name: _numbered(getattr(part, field.name), numbers) for field in dataclasses.fields(part)}
    return dataclasses.replace(part, **fields)
