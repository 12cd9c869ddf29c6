"""From an attention in the graph to a `Match`: facts for the planner and its plan, or the one reason to keep it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...config import config
from ...entries.attention import Attention, Backward, Forward, Found, Gradient, Inputs, NotReadable, Refusal, Sink
from ...entries.biases import FoundBias, bias_of, find_bias, may_broadcast
from ...entries.logsumexp import cause_of_results
from ...errors import ArgumentError
from ...graph import sizes as layout
from ...graph.arguments import name_of
from ...graph.nodes import origin
from ...masks.documents import Documents
from ...masks.nodes import inputs_of
from ...masks.normal_form import Terms
from ...masks.recognition import recognise
from ...model.call import Bias, Call
from ...model.dropout import Dropout
from ...model.mask import Band, Mask
from ...model.plan import Kept, Plan
from ...model.reasons import Reason
from ...model.site import DType, Site
from ...model.terms import TERMS, Operand, Placed, Segments
from ...planning import decide
from ...records.records import Tensors
from ...upstream import arch, configs, toolchain
from .operands import Operands, find_operands

DTYPES: dict[torch.dtype, DType] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}


@dataclass(frozen=True)
class Match:
    """An attention that can be replaced: a backward, or a forward without one in its graph.

    Attributes:
        attention: the attention, as its entry found it.
        site, plan: the facts that the planner was given, and its answer.
        operands: the query, key and value that the new operators read, and the layouts of the gradients.
        terms: the mask, with the nodes from which the call's extra operands are computed.
        bias: the bias that is added to the scores, beside the mask; None for none.
        note: why it is a bias and no mask.
    """

    attention: Attention
    site: Site
    plan: Plan
    operands: Operands
    terms: Terms
    bias: FoundBias | None = None
    note: str = ""

    @property
    def node(self) -> Node:
        """The backward; the forward where that is alone."""
        return self.attention.node

    @property
    def device(self) -> torch.device:
        """The device on which the site runs."""
        return device_of(self.node)

    @property
    def needs_our_forward(self) -> bool:
        """Whether the backward reads what only our forward leaves, or draws, or makes of the mask."""
        backward = self.attention.backward
        return bool(self.site.call.of_forward.operands) or (backward is not None and backward.logsumexp is None)

    @property
    def detail(self) -> str:
        """The detail of the record: how the site was matched."""
        dropout = "" if self.site.dropout is None else f"dropout with probability {self.site.dropout.p}"
        about = dropout, self.attention.note, self.operands.detail, self.note, self.plan.schedule_note
        return "; ".join(filter(None, about))


@dataclass
class SiteFacts:
    """The facts known of a site so far; a kept site's record shows them too.  The fields are those of `SiteRecord`."""

    site: Site | None = None
    mask: str = ""
    tensors: Tensors | None = None
    inputs: tuple[str, ...] = ()
    recognised: str = ""
    arch: str = ""


def analyse(found: Found, facts: SiteFacts) -> Match:
    """Read one attention.  `facts` is filled in as far as the reading gets.

    Raises:
        NotReadable: the attention stays as it is.
    """
    if isinstance(found, Refusal):
        facts.tensors = found.tensors
        if not found.everywhere:
            _check_device(device_of(found.node))
        raise NotReadable(found.kept.reason, found.kept.detail)
    attention, inputs = found, found.inputs
    _look(attention, facts)
    device = device_of(attention.node)
    _check_device(device)
    refusal = attention.refusal()
    if refusal is not None:
        raise NotReadable(refusal.reason, refusal.detail)
    query, key, value = inputs.query.tensor, inputs.key.tensor, inputs.value.tensor
    _check_sizes(query, key, value)
    _check_dtypes(attention)
    if attention.backward is not None:
        _check_forward_is_ours(attention.backward)
        _check_logsumexp(attention.backward, query)
    elif attention.forward is not None:
        _check_lone_forward(attention.forward)
    terms, bias, cause = _terms(attention, facts)
    mask = mask_of(terms)
    facts.mask = str(mask) if bias is None else f"{mask} + bias"
    # Only now, because a guard is for sites that are replaced: heads and head dimensions become numbers.
    q_heads, kv_heads, head_dim, value_dim = map(_known, (query.shape[1], key.shape[1], query.shape[3], value.shape[3]))
    if not kv_heads or q_heads % kv_heads:
        raise NotReadable(Reason.SHAPE, f"{q_heads} heads of query, {kv_heads} of key")
    call = _call(mask, bias, inputs, head_dim)
    if attention.backward is not None and attention.backward.grad_logsumexp is not None:
        _check_gradient(attention.backward.grad_logsumexp, query)
        call = replace(call, grad_logsumexp=Operand(len(call.operands)))
    if inputs.sinks is not None:
        call = replace(call, sinks=Operand(len(call.operands)))
    if attention.forward is not None and _reads_logsumexp(attention.forward, attention.backward):
        call = replace(call, logsumexp=True)
    if attention.backward is None and attention.forward is not None:
        given = cause_of_results(attention.forward, call, attention.forward.not_read)
        if given:
            raise NotReadable(Reason.FORWARD_RESULTS, given)
    operands = find_operands(attention)
    dtype = DTYPES[query.dtype]
    lengths: list[layout.Dim] = [query.shape[2], key.shape[2]]
    if terms.documents is not None:
        lengths = [terms.documents.rows(length) for length in lengths]
    q_len, kv_len = map(layout.static, lengths)
    facts.site = site = Site(
        device="cpu" if device.type == "cpu" else "cuda",
        dtype=dtype,
        batch=layout.static(query.shape[0]),
        q_heads=q_heads,
        kv_heads=_known(operands.kv_heads),
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=value_dim,
        call=call,
        allow_tf32=dtype == "float32" and arch.allow_tf32(device),
    )
    facts.arch = arch.arch_of(device)
    for name, gradient in zip(("dq", "dk", "dv"), operands.gradients, strict=True):
        if gradient.order is None:
            raise NotReadable(Reason.LAYOUT, f"{name} is not dense")
    decision = decide(site, facts.arch, config.schedule, compiler=toolchain.numerics())
    if isinstance(decision, Kept):
        if decision.reason is Reason.MASK_UNSUPPORTED and cause is not None:
            raise NotReadable(cause.reason, cause.detail)
        raise NotReadable(decision.reason, decision.detail)
    note = ""
    if cause is not None:
        note = ": ".join(filter(None, ("the mask is added as a bias", cause.reason.value, cause.detail)))
    return Match(attention, site, decision, operands, terms, bias, note)


def _reads_logsumexp(forward: Forward, backward: Backward | None) -> bool:
    """Whether anything but this backward reads the log-sum-exp, other backwards too."""
    own = frozenset() if backward is None else frozenset({backward.node})
    return forward.logsumexp is not None and not forward.given(own).isdisjoint({forward.logsumexp.index, None})


def _check_device(device: torch.device) -> None:
    if device.type == "cpu" and config.cpu == "off":
        raise NotReadable(Reason.CPU_OFF)
    if not arch.is_supported(device):
        raise NotReadable(Reason.DEVICE, str(device))


def _look(attention: Attention, facts: SiteFacts) -> None:
    """Find the facts that can be seen without reading anything back."""
    inputs = attention.inputs
    facts.tensors = attention.tensors
    facts.inputs = tuple(dict.fromkeys(name_of(found) for source in inputs.data for found in inputs_of(source)))
    if inputs.mask is not None:
        facts.recognised = f"not read: {inputs.mask_text or _mask_text(inputs.mask.value)}"
    elif inputs.flags is not None:
        facts.mask = str(inputs.flags)


def _mask_text(mask: Node) -> str:
    value = mask.meta["val"]
    shape = "x".join("?" if n is None else str(n) for n in map(layout.static, value.shape))
    return f"a tensor {shape} {str(value.dtype).removeprefix('torch.')}"


def device_of(node: Node) -> torch.device:
    """The device on which an operator runs."""
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if isinstance(value, Tensor):
            return value.device
    raise ValueError(f"no tensor argument of {node.format_node()} has a value")


def _known(x: layout.Dim) -> int:
    """A size that kernels are compiled for: a dynamic one is guarded, so that another value compiles another graph."""
    value = layout.specialised(x)
    if value is None:
        raise NotReadable(Reason.DYNAMIC_DIMS, f"a size is {x}")
    return int(value)


def _call(mask: Mask, bias: FoundBias | None, inputs: Inputs, head_dim: int) -> Call:
    """The call; its operands are counted in the order in which `extras` makes them."""
    try:
        call = Call(mask, _scale(inputs.scale, head_dim), **_modifiers(inputs.modifiers))
    except ArgumentError as error:
        raise NotReadable(Reason.UNSUPPORTED_OP, str(error)) from error
    if bias is not None:
        call = replace(call, bias=Bias(Operand(len(call.operands)), bias.gradient is not None))
    return replace(call, dropout=_dropout(inputs.dropout, Operand(len(call.operands))))


def _scale(scale: object, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    value = _number(scale)
    if value is None:
        raise NotReadable(Reason.DYNAMIC_DIMS, f"scale={scale}")
    return value


def _modifiers(found: Mapping[str, object]) -> dict[str, Any]:
    """The modifiers of scores by name; zero is none, as the operators of flash-attn have it."""
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
    if configs.functorch.activation_memory_budget == 0:  # saves inputs alone, whatever a node says of itself
        raise NotReadable(Reason.DROPOUT, "activation_memory_budget=0 has random numbers drawn again in the backward")
    return Dropout(value, seed)


def _number(argument: object) -> float | None:
    """A number that kernels are compiled for, guarded where it is symbolic; None where it cannot be known."""
    number = argument.meta["val"] if isinstance(argument, Node) else argument
    value = layout.specialised(number) if isinstance(number, (int, float, torch.SymInt, torch.SymFloat)) else None
    return None if value is None else float(value)


def _check_sizes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.dim() == key.dim() == value.dim() == 4:
        raise NotReadable(Reason.SHAPE, f"{query.dim()}, {key.dim()} and {value.dim()} dimensions")
    shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
    # Dynamic sizes that may differ as far as the graph knows are equal: PyTorch's operators need that too.
    pairs = [
        (query.shape[0], key.shape[0]),
        *zip(key.shape[:3], value.shape[:3], strict=True),
        (query.shape[3], key.shape[3]),
    ]
    if any(layout.differ(a, b) for a, b in pairs) or 0 in map(layout.static, (*query.shape, *key.shape)):
        raise NotReadable(Reason.SHAPE, shapes)


def _check_dtypes(attention: Attention) -> None:
    inputs, backward = attention.inputs, attention.backward
    of_backward = () if backward is None else (backward.out, backward.grad_out)
    views = [view for view in (inputs.query, inputs.key, inputs.value, *of_backward) if view is not None]
    dtypes = [view.node.meta["val"].dtype for view in views]
    if len(set(dtypes)) != 1 or dtypes[0] not in DTYPES:
        named = [f"{view.argument.place}: {dtype}" for view, dtype in zip(views, dtypes, strict=True)]
        raise NotReadable(Reason.DTYPE, ", ".join(named))


def _check_lone_forward(forward: Forward) -> None:
    if config.forward == "keep":
        raise NotReadable(Reason.FORWARD_OFF)
    if forward.order is None:
        raise NotReadable(Reason.LAYOUT, "its output is not dense")


def _check_gradient(gradient: Gradient, query: Tensor) -> None:
    """Floats [B, H, Sq]."""
    value = gradient.argument.value.meta["val"]
    if not value.dtype.is_floating_point or not layout.same_all(value.shape, query.shape[:3]):
        raise NotReadable(Reason.LAYOUT, f"gradient of the log-sum-exp {value.dtype} {tuple(value.shape)}")


def _check_forward_is_ours(backward: Backward) -> None:
    """A backward that reads no output can only be replaced with its forward."""
    if backward.out is None and config.forward == "keep":
        raise NotReadable(Reason.FORWARD_OFF)


def _check_logsumexp(backward: Backward, query: Tensor) -> None:
    """[B, H, >= Sq] or [B, H, Sq, 1]; fp32."""
    if backward.logsumexp is None:
        return
    logsumexp = backward.logsumexp.value.meta["val"]
    trailing_one = logsumexp.dim() == 4 and layout.static(logsumexp.shape[3]) == 1
    heads_fit = logsumexp.dim() >= 3 and layout.same_all(logsumexp.shape[:2], query.shape[:2])
    if logsumexp.dtype != torch.float32 or not heads_fit or not (logsumexp.dim() == 3 or trailing_one):
        raise NotReadable(Reason.LAYOUT, f"log-sum-exp {logsumexp.dtype} {tuple(logsumexp.shape)}")


def _terms(attention: Attention, facts: SiteFacts) -> tuple[Terms, FoundBias | None, Kept | None]:
    """The mask; what is added to the scores beside it; and why that is a bias and no mask."""
    inputs = attention.inputs
    if inputs.documents is not None:
        facts.recognised = "documents of packed tokens, whose offsets are arguments of the operator"
        return Terms(inputs.band(), documents=Documents(origin(inputs.documents.value))), None, None
    query, key = inputs.query, inputs.key
    q_len, kv_len = query.tensor.shape[2], key.tensor.shape[2]
    found = [Terms(inputs.band())]
    bias = cause = None
    plane = [*query.tensor.shape[:3], kv_len]
    if inputs.mask is not None and inputs.bias is None and _bias_gradient(attention) is not None:
        cause = Kept(Reason.BIAS_GRADIENT)
    elif inputs.mask is not None:
        result = recognise(inputs.mask.value, query=query.node, key=key.node, beside=inputs.sinks is not None)
        if result.terms is None:
            cause = Kept(Reason(f"mask_{result.reason}"), result.detail)
        else:
            facts.recognised = result.how
            found.append(result.terms)
    if cause is not None:
        assert inputs.mask is not None
        if inputs.bias is not None or inputs.mask_only:
            raise NotReadable(cause.reason, "; ".join(filter(None, (cause.detail, inputs.mask_only))))
        added = inputs.mask_as_floats or inputs.mask
        facts.recognised = f"not recognised: {_mask_text(added.value)}"
        bias = find_bias(added, _bias_gradient(attention), plane)
        if bias is None:
            raise NotReadable(*_why_no_bias(added.value, plane, cause))
        facts.recognised += ", which is added to the scores as it is"
    if inputs.bias is not None:
        bias = find_bias(inputs.bias, _bias_gradient(attention), plane)
        if bias is None:
            raise NotReadable(
                *_why_no_bias(inputs.bias.value, plane, Kept(Reason.SHAPE, "the bias is no tensor of floats"))
            )
        gradients = () if attention.backward is None else attention.backward.tensor_gradients()
        bias = bias_of(inputs.bias, gradients, plane) if gradients else bias
    if inputs.slopes is not None:
        bias = FoundBias(inputs.slopes, slopes=True)
    band = intersect([terms.band for terms in found], layout.static(q_len), layout.static(kv_len))
    return replace(found[-1], band=band), bias, cause


def _bias_gradient(attention: Attention) -> Sink | None:
    """The sink of the gradient of the bias, if something uses it."""
    sink = None if attention.backward is None else attention.backward.bias_gradient
    return None if sink is None or sink.used is None else sink


def _why_no_bias(mask: Node, plane: Sequence[layout.Dim], cause: Kept) -> tuple[Reason, str]:
    """Why a mask that cannot be read cannot be added to the scores either: the true cause, if that is in the sizes."""
    value = mask.meta["val"]
    if not value.dtype.is_floating_point or not may_broadcast(mask, plane):
        return cause.reason, cause.detail
    sizes = f"the mask has the sizes {list(value.shape)}, the scores {list(plane)}"
    return Reason.DYNAMIC_DIMS, f"{sizes}: whether these are the same is not known"


def mask_of(terms: Terms) -> Mask:
    """The mask of these terms; its operands are counted in the order in which `extras` makes them."""
    numbers = itertools.count()

    def operand() -> Operand:
        return Operand(next(numbers))

    if terms.documents is not None:
        return Mask(terms.band, segments=Segments(operand(), operand(), Placed(operand(), operand())))
    found = []
    for term in terms.in_order:
        kind, given = TERMS[term.NAME], dict[str, Operand]()
        for name in kind.ROLES:
            if name in term.fields:
                given[name] = given[term.same[name]] if name in term.same else operand()
        found.append(kind(**dict.fromkeys(kind.ROLES) | given))
    return Mask(terms.band, *found)


def intersect(bands: list[Band], q_len: int | None, kv_len: int | None) -> Band:
    """The band of what all of them show.

    Raises:
        NotReadable: it is no band: empty, or the offset between two anchors is not known.
    """
    if len({band.anchor for band in bands if not band.is_full}) > 1:
        if q_len is None or kv_len is None:
            raise NotReadable(Reason.MASK_NOT_A_BAND, " and ".join(map(str, bands)) + " with dynamic lengths")
        bands = [band.resolve(q_len, kv_len) for band in bands]
    bands = [band for band in bands if not band.is_full]
    lo = max((band.lo for band in bands if band.lo is not None), default=None)
    hi = min((band.hi for band in bands if band.hi is not None), default=None)
    if lo is not None and hi is not None and lo > hi:
        raise NotReadable(Reason.MASK_NOT_A_BAND, "nothing is visible: " + " and ".join(map(str, bands)))
    return Band(lo, hi, bands[0].anchor if bands else "top_left")
