"""Analyses one attention of a graph: checks whether it is supported, reads its mask and bias, and plans its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ...config import config
from ...errors import ArgumentError
from ...frontends.attention import Attention, Backward, Forward, Found, Inputs, NotReadable, Refusal
from ...frontends.biases import FoundBias
from ...frontends.logsumexp import cause_of_results
from ...graph import sizes as layout
from ...graph.arguments import name_of
from ...masks.nodes import inputs_of
from ...masks.normal_form import Components
from ...model.attention_spec import AttentionSpec
from ...model.components import Operand
from ...model.dropout import Dropout
from ...model.mask import Mask
from ...model.operands import ADDED, OPERANDS, Bias
from ...model.plan import Fallback
from ...model.reasons import Reason
from ...model.site import Site
from ...planning import decide
from ...upstream import arch, configs, toolchain
from .checks import DTYPES, check, check_gradient, check_pairs
from .match import Analysis, Match, SiteFacts, device_of
from .operands import Operands, find_operands
from .reading import MaskReading, mask_of, mask_text, read_bias, read_mask


def analyse(found: Found) -> Analysis:
    """Decides whether an attention can be replaced, and by which plan.  The graph is not changed.

    If the number of heads or a head dimension is symbolic, it gets a guard, so that another value recompiles.

    Returns:
        The match, the reason why the attention is not replaced, or an unexpected error, with the facts for its record.
    """
    facts = _look(found)
    try:
        attention = check(found)
        mask = read_mask(attention)
        facts = replace(facts, recognised=mask.how or facts.recognised)
        bias = read_bias(attention, mask.cause)
        if mask.cause is not None:
            facts = replace(facts, recognised=f"{mask.how}, which is added to the scores as it is")
        facts = replace(facts, mask=_mask_text(attention.inputs, mask.components, bias))
        spec, operands = _spec(attention, mask.components, bias), find_operands(attention)
        facts = replace(facts, site=_site(attention, mask.components, spec, operands))
        facts = replace(facts, arch=arch.arch_of(device_of(attention.node)))
        return Analysis(facts, _plan(attention, facts, mask, bias, operands))
    except NotReadable as error:
        return Analysis(facts, fallback=error.fallback)
    except Exception as error:  # a bug of dash_inductor must not fail the compile
        return Analysis(facts, error=error)


def _look(found: Found) -> SiteFacts:
    """The facts that are visible before the mask is read."""
    if isinstance(found, Refusal):
        return SiteFacts(tensors=found.tensors)
    inputs = found.inputs
    names = tuple(dict.fromkeys(name_of(each) for source in inputs.data for each in inputs_of(source)))
    facts = SiteFacts(tensors=found.tensors, inputs=names)
    if inputs.mask is not None:
        return replace(facts, recognised=f"not read: {inputs.mask_text or mask_text(inputs.mask.value)}")
    return facts if inputs.flags is None else replace(facts, mask=str(inputs.flags))


def _spec(attention: Attention, components: Components, bias: FoundBias | None) -> AttentionSpec:
    """The `AttentionSpec` of an attention, with its operands numbered in the order in which `extras` builds them.

    Raises:
        NotReadable: the operators do not support the arguments, or the program reads results that they do not return.
    """
    inputs, forward, backward = attention.inputs, attention.forward, attention.backward
    query, key = inputs.query.tensor, inputs.key.tensor
    # Guards make heads and head dimensions numbers only here, so that sites that are not replaced get no guards.
    q_heads, kv_heads, head_dim, _ = map(_known, (query.shape[1], key.shape[1], query.shape[3], _value_dim(attention)))
    if not kv_heads or q_heads % kv_heads:
        raise NotReadable(Reason.SHAPE, f"{q_heads} heads of query, {kv_heads} of key")
    spec = _spec_of_inputs(mask_of(components), inputs, head_dim)
    for name, kind in OPERANDS.items():
        own = spec.of_backward if kind.side == "backward" else spec.of_forward
        part = _part(name, Operand(len(own.operands)), attention, bias)
        spec = spec if part is None else replace(spec, **{name: part})
    if forward is not None and _reads_logsumexp(forward, backward):
        spec = replace(spec, logsumexp=True)
    if backward is None and forward is not None:
        given = cause_of_results(forward, spec, forward.not_read)
        if given:
            raise NotReadable(Reason.FORWARD_RESULTS, given)
    return spec


def _mask_text(inputs: Inputs, components: Components, bias: FoundBias | None) -> str:
    """The mask and the names of the operands that are added to scores: "causal + bias"."""
    names = [name for name in ADDED if (bias if name == "bias" else getattr(inputs, name)) is not None]
    return " + ".join((str(mask_of(components)), *names))


def _part(name: str, operand: Operand, attention: Attention, bias: FoundBias | None) -> Any:
    """An optional operand of an attention by its name in `OPERANDS`; None if the attention does not have it."""
    inputs, backward = attention.inputs, attention.backward
    if name == "bias":
        return None if bias is None else Bias(operand, bias.gradient is not None)
    if name == "dropout":
        return _dropout(inputs.dropout, operand)
    if name == "grad_logsumexp":
        if backward is None or backward.grad_logsumexp is None:
            return None
        check_gradient(backward.grad_logsumexp, inputs.query.tensor)
        return operand
    return None if getattr(inputs, name) is None else operand


def _value_dim(attention: Attention) -> layout.Dim:
    return attention.inputs.value.tensor.shape[3]


def _site(attention: Attention, components: Components, spec: AttentionSpec, operands: Operands) -> Site:
    """The `Site` of an attention: the static facts on which its plan depends."""
    inputs, device = attention.inputs, device_of(attention.node)
    query, key = inputs.query.tensor, inputs.key.tensor
    lengths: list[layout.Dim] = [query.shape[2], key.shape[2]]
    if components.documents is not None:
        lengths = [components.documents.rows(length) for length in lengths]
    q_len, kv_len = map(layout.static, lengths)
    dtype = DTYPES[query.dtype]
    return Site(
        device="cpu" if device.type == "cpu" else "cuda",
        dtype=dtype,
        batch=layout.static(query.shape[0]),
        q_heads=_known(query.shape[1]),
        kv_heads=_known(operands.kv_heads),
        q_len=q_len,
        kv_len=kv_len,
        head_dim=_known(query.shape[3]),
        value_dim=_known(_value_dim(attention)),
        spec=spec,
        allow_tf32=dtype == "float32" and arch.allow_tf32(device),
    )


def _plan(
    attention: Attention, facts: SiteFacts, mask: MaskReading, bias: FoundBias | None, operands: Operands
) -> Match:
    """Plans the site of `facts`.

    Raises:
        NotReadable: no kernel can run it, or the layout of a gradient is not dense.
    """
    assert facts.site is not None
    for name, gradient in zip(("dq", "dk", "dv"), operands.gradients, strict=True):
        if gradient.order is None:
            raise NotReadable(Reason.LAYOUT, f"{name} is not dense")
    decision = decide(facts.site, facts.arch, config.schedule, compiler=toolchain.numerics(), split_kv=config.split_kv)
    cause, note = mask.cause, ""
    if isinstance(decision, Fallback):
        true_cause = cause if decision.reason is Reason.MASK_UNSUPPORTED and cause is not None else decision
        raise NotReadable(true_cause.reason, true_cause.detail)
    if cause is not None:
        note = ": ".join(filter(None, ("the mask is added as a bias", cause.reason.value, cause.detail)))
    check_pairs(attention, mask.components, bias, decision)
    gradients = () if attention.backward is None else attention.backward.factor_gradients()
    return Match(attention, facts.site, decision, operands, mask.components, bias, gradients, note)


def _reads_logsumexp(forward: Forward, backward: Backward | None) -> bool:
    """Whether anything except this backward reads the log-sum-exp; other backwards count as well."""
    own = frozenset() if backward is None else frozenset({backward.node})
    return forward.logsumexp is not None and not forward.given(own).isdisjoint({forward.logsumexp.index, None})


def _known(x: layout.Dim) -> int:
    """A size for which kernels are specialised; a dynamic one gets a guard, so that another value recompiles.

    Raises:
        NotReadable: the size depends on data.
    """
    value = layout.specialised(x)
    if value is None:
        raise NotReadable(Reason.DYNAMIC_DIMS, f"a size is {x}")
    return int(value)


def _spec_of_inputs(mask: Mask, inputs: Inputs, head_dim: int) -> AttentionSpec:
    try:
        return AttentionSpec(mask, _scale(inputs.scale, head_dim), **_modifiers(inputs.modifiers))
    except ArgumentError as error:
        raise NotReadable(Reason.UNSUPPORTED_OP, str(error)) from error


def _scale(scale: object, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    value = _number(scale)
    if value is None:
        raise NotReadable(Reason.DYNAMIC_DIMS, f"scale={scale}")
    return value


def _modifiers(found: Mapping[str, object]) -> dict[str, Any]:
    """The score modifiers (`MODIFIERS`) by name; a value of 0 means none, as in flash-attn's operators."""
    values = {name: (number, _number(number)) for name, number in found.items() if number is not None}
    for name, (number, value) in values.items():
        if value is None:
            raise NotReadable(Reason.DYNAMIC_DIMS, f"{name}={number}")
    return {name: value for name, (_, value) in values.items() if value}


def _dropout(p: object, seed: Operand) -> Dropout | None:
    value = _number(p)
    if value == 0.0:
        return None
    if value is None or not 0.0 < value < 1.0:
        raise NotReadable(Reason.DROPOUT, f"dropout_p={p}")
    if configs.functorch.activation_memory_budget == 0:  # saves only inputs, and ignores MUST_SAVE of a node
        raise NotReadable(Reason.DROPOUT, "activation_memory_budget=0 has random numbers drawn again in the backward")
    return Dropout(value, seed)


def _number(argument: object) -> float | None:
    """A number for which kernels are specialised, with a guard if it is symbolic; None if it cannot be known."""
    number = argument.meta["val"] if isinstance(argument, Node) else argument
    value = layout.specialised(number) if isinstance(number, (int, float, torch.SymInt, torch.SymFloat)) else None
    return None if value is None else float(value)
