"""The graph operators for attention's forward and backward and the dropout seed: schemas, fake and eager kernels.

    attention_forward(query, key, value, extras, spec, plan, site) -> (out, logsumexp)
    attention_backward(grad_out, query, key, value, out, logsumexp, extras, spec, plan, site) -> [dq, dk, dv, ...]
    dropout_seed(drawn, site) -> seed

The attention spec names the results of a backward, see `AttentionSpec.results`: the gradient of a bias, if the graph
needs it, follows dq, dk and dv, or delta, from which the gradient of sinks is computed.

Shapes:
    query, grad_out, out: [batch, q heads, q_len, head dim (that of value for the latter two)].
    key, value: [batch, kv heads, kv_len, head dim].
    logsumexp: fp32 [batch, q heads, q_len], natural logarithm; with a bias it has two parts, [batch, q heads,
        2 * q_len], see `numbers_per_row`.
    drawn: an int64 scalar, one of the numbers that a graph has drawn from a device's default generator.
    seed: int64 [1], the same number, read by the forward and the backwards of a site with dropout.

For a packed (varlen) mask (`model.VarlenLayout`), the log-sum-exp has padded rows in place of tokens, -inf in rows that
have none, and the other tensors are [tokens, heads, head dim], as in PyTorch's packed operators.

`extras` holds the tensors to which the call refers by index, followed by the tables of `mask_tables` for Hopper kernels
that read tile tables.  `spec` and `plan` are texts (`model.AttentionSpec`, `model.Plan`); `site` is the name of the
site's record with the module path.  So every graph dump, generated code and profile shows what was decided for which
site.

Importing this module imports torch and defines the operators; Inductor's lowerings are in `dash_inductor.lowering`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, DashError
from ..kernels.common.layouts import as_given, empty_ordered, heads_first
from ..kernels.execution import Run
from ..model.attention_spec import AttentionSpec
from ..model.mask import ROW_BLOCK
from ..model.plan import Plan
from ..upstream import profiler
from . import flops
from .direct import call_directly
from .prepared import Texts, prepared

FORWARD = ("query", "key", "value")
"""The tensors of `attention_forward` before the extras."""
BACKWARD = ("grad_out", *FORWARD, "out", "logsumexp")
"""The tensors of `attention_backward` before the extras."""

_lib = torch.library.Library("dash_inductor", "DEF")
for _name, _tensors, _results in (
    ("attention_forward", FORWARD, "(Tensor out, Tensor logsumexp)"),
    ("attention_backward", BACKWARD, "Tensor[]"),
):
    _arguments = ", ".join(f"Tensor {tensor}" for tensor in _tensors)
    _lib.define(
        f"{_name}({_arguments}, Tensor[] extras, str spec, str plan, str site) -> {_results}",
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
_lib.define("dropout_seed(Tensor drawn, str site) -> Tensor")

attention_forward = torch.ops.dash_inductor.attention_forward.default
attention_backward = torch.ops.dash_inductor.attention_backward.default
dropout_seed = torch.ops.dash_inductor.dropout_seed.default


def numbers_per_row(spec: AttentionSpec) -> int:
    """The number of fp32 values per row of the log-sum-exp: two with a bias, else one.

    With a bias they are the largest score and a logarithm in base 2; Note [Log-sum-exp in two parts] in
    kernels/portable/device/tiles.py gives the reason.  All first values precede all second ones.
    """
    return 2 if spec.traits.biased else 1


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, extras: list[Tensor], spec: str, plan: str, site: str
) -> tuple[Tensor, Tensor]:
    parsed = _parsed(spec, extras, results=1)
    (order,) = parsed.orders
    query, value = heads_first((query, value), parsed)
    out = empty_ordered([*query.shape[:3], value.shape[3]], order, query)
    batch, heads, q_len, _ = query.shape
    layout = parsed.mask.varlen_layout
    rows = q_len if layout is None else extras[layout.token_offset.index].shape[0] * ROW_BLOCK
    logsumexp = query.new_empty((batch, heads, numbers_per_row(parsed) * rows), dtype=torch.float32)
    return as_given(out, parsed), logsumexp


def _fake_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    extras: list[Tensor],
    spec: str,
    plan: str,
    site: str,
) -> list[Tensor]:
    parsed = _parsed(spec, extras, results=3)
    tensors = heads_first((query, key, value), parsed)
    found = [
        as_given(empty_ordered(tensor.shape, order, tensor), parsed)
        for tensor, order in zip(tensors, parsed.orders, strict=True)
    ]
    if "dbias" in parsed.results:
        assert parsed.bias is not None
        size = bias_gradient_size(query.shape, key.shape[2], parsed.bias.summed)
        found.append(query.new_empty(size, dtype=extras[parsed.bias.operand.index].dtype))
    if parsed.delta:
        found.append(query.new_empty(query.shape[:3], dtype=torch.float32))
    return found


def bias_gradient_size(query: Sequence[Any], kv_len: Any, summed: Sequence[int]) -> list[Any]:
    """The shape of a bias's gradient: [batch, heads, q_len, kv_len], with size 1 along the dimensions in `summed`.

    `query` is the shape of the query; sizes are integers or symbols.
    """
    return [1 if dim in summed else size for dim, size in enumerate((*query[:3], kv_len))]


def _parsed(text: str, extras: Sequence[Tensor], results: int) -> AttentionSpec:
    """Parses a call, and checks that it has the layouts of `results` results and that all its operands are in `extras`.

    A varlen mask has no delta, because its rows are not tokens.

    Raises:
        ArgumentError: one of these checks fails.
    """
    spec = AttentionSpec.parse(text)
    if spec.delta and spec.mask.varlen_layout is not None:
        raise ArgumentError("spec", text, "one whose mask is not one of rows")
    if len(spec.orders) != results:
        raise ArgumentError("spec", text, f"orders of {results} results")
    missing = [operand.index for operand in spec.operands if operand.index >= len(extras)]
    if missing:
        raise ArgumentError("extras", f"{len(extras)} tensors", f"more: the call {text} reads number {missing[0]}")
    return spec


def prepare_forward(tensors: Sequence[Tensor], extras: Sequence[Tensor], texts: Texts) -> Run:
    """Returns the function that runs forwards on tensors with the layouts of the given ones, outside of Inductor.

    Args:
        tensors: query, key and value.
        extras: the other tensors to which the call refers.
        texts: the call, the plan and the site's name.

    Raises:
        ArgumentError: the kernels of the plan do not cover the call, or the tensors do not fit it.
    """
    from ..kernels.registry import forward

    return forward(tensors, extras, _parsed(texts[0], extras, results=1), Plan.parse(texts[1]), texts[2])


def prepare_backward(tensors: Sequence[Tensor], extras: Sequence[Tensor], texts: Texts) -> Run:
    """Returns the function that runs backwards on tensors with the layouts of the given ones, outside of Inductor.

    Args:
        tensors: the tensors named in `BACKWARD`.
        extras: the other tensors to which the call refers.
        texts: the call, the plan and the site's name.

    Raises:
        ArgumentError: the kernels of the plan do not cover the call, or the tensors do not fit it.
    """
    from ..kernels.registry import backward

    return backward(tensors, extras, _parsed(texts[0], extras, results=3), Plan.parse(texts[1]), texts[2])


def _fake_seed(drawn: Tensor, site: str) -> Tensor:
    return drawn.new_empty(1)


def _seed(drawn: Tensor, site: str) -> Tensor:
    return drawn.reshape(1).clone()


def _not_differentiable(ctx: object, *grads: Tensor) -> None:
    raise DashError(
        "the operators of dash stand in compiled graphs, where forward and backward are already separate; autograd "
        "cannot differentiate through them"
    )


_FAKES: dict[str, Callable[..., Any]] = {
    "attention_forward": _fake_forward,
    "attention_backward": _fake_backward,
    "dropout_seed": _fake_seed,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"dash_inductor::{_name}", _fake, lib=_lib)
    torch.library.register_autograd(f"dash_inductor::{_name}", _not_differentiable, lib=_lib)


flops.register(attention_forward, attention_backward)


def _in_profile(implementation: Callable[..., Any], site: int) -> Callable[..., Any]:
    """Wraps an implementation so that profiles show it under the name of its site, argument number `site`."""

    @functools.wraps(implementation)
    def run(*args: Any) -> Any:
        if not profiler.is_on():
            return implementation(*args)
        with profiler.Span(f"dash_inductor {args[site]}"):
            return implementation(*args)

    return run


# Eager calls run what can be launched without Inductor, else the reference executor (see `kernels.registry`); compiled
# calls on CUDA are lowered to the plan's kernels.
for _operator, _prepare, _count in (
    (attention_forward, prepare_forward, len(FORWARD)),
    (attention_backward, prepare_backward, len(BACKWARD)),
):
    _implementation = prepared(_prepare, _count)
    for _device in ("CPU", "CUDA"):
        _lib.impl(_operator._opname, _in_profile(_implementation, _count + 3), _device)
    call_directly(_operator, _implementation, takes_layouts=True)
for _device in ("CPU", "CUDA"):
    _lib.impl("dropout_seed", _seed, _device)
