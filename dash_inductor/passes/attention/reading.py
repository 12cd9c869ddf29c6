"""Recognises an attention's mask as a conjunction of components, and finds the bias that is added to its scores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from ...frontends.attention import Attention, NotReadable, Sink
from ...frontends.biases import FoundBias, bias_of, find_bias, may_broadcast
from ...graph import sizes as layout
from ...graph.nodes import origin
from ...masks.documents import Documents
from ...masks.normal_form import Components
from ...masks.recognition import recognise
from ...model.components import COMPONENTS, Operand, Segments, VarlenLayout
from ...model.mask import Band, Mask
from ...model.plan import Fallback
from ...model.reasons import Reason


@dataclass(frozen=True)
class MaskReading:
    """What was recognised of an attention's mask.

    Attributes:
        components: the recognised components; for a mask tensor that was not recognised, those from the operator's
            arguments (`is_causal`, windows) alone.
        how: a text for the record: how the mask was recognised, or which tensor was not.
        cause: why the mask tensor was not recognised or must stay a bias; None if it was recognised or there is none.
    """

    components: Components
    how: str = ""
    cause: Fallback | None = None


def read_mask(attention: Attention) -> MaskReading:
    """Recognises an attention's mask from its mask tensor and from its arguments (`is_causal`, windows, documents).

    Raises:
        NotReadable: the mask shows no key at all, or the intersection of its bands is not known to be a band.
    """
    inputs = attention.inputs
    if inputs.documents is not None:
        how = "documents of packed tokens, whose offsets are arguments of the operator"
        return MaskReading(Components(inputs.band(), documents=Documents(origin(inputs.documents.value))), how)
    query, key = inputs.query, inputs.key
    lengths = layout.static(query.tensor.shape[2]), layout.static(key.tensor.shape[2])
    told = Components(intersect([inputs.band()], *lengths))
    if inputs.mask is None:
        return MaskReading(told)
    added = inputs.mask_as_floats or inputs.mask
    not_read = f"not recognised: {mask_text(added.value)}"
    if inputs.bias is None and _bias_gradient(attention) is not None:
        return MaskReading(told, not_read, Fallback(Reason.BIAS_GRADIENT))
    result = recognise(inputs.mask.value, query=query.node, key=key.node, beside=inputs.sinks is not None)
    if result.components is None:
        return MaskReading(told, not_read, Fallback(Reason(f"mask_{result.reason}"), result.detail))
    band = intersect([inputs.band(), result.components.band], *lengths)
    return MaskReading(replace(result.components, band=band), result.how)


def read_bias(attention: Attention, cause: Fallback | None) -> FoundBias | None:
    """Returns the bias that the operators add to the scores; None if there is none.

    Args:
        attention: the attention.
        cause: why the mask tensor was not recognised (`MaskReading.cause`), in which case it is the bias; else None.

    Raises:
        NotReadable: the operators cannot add this tensor.
    """
    inputs, bias = attention.inputs, None
    plane = [*inputs.query.tensor.shape[:3], inputs.key.tensor.shape[2]]
    if cause is not None:
        assert inputs.mask is not None
        if inputs.bias is not None or inputs.mask_only:
            raise NotReadable(cause.reason, "; ".join(filter(None, (cause.detail, inputs.mask_only))))
        added = inputs.mask_as_floats or inputs.mask
        bias = find_bias(added, _bias_gradient(attention), plane)
        if bias is None:
            raise NotReadable(*_why_no_bias(added.value, plane, cause))
    if inputs.bias is not None:
        bias = find_bias(inputs.bias, _bias_gradient(attention), plane)
        if bias is None:
            no_floats = Fallback(Reason.SHAPE, "the bias is no tensor of floats")
            raise NotReadable(*_why_no_bias(inputs.bias.value, plane, no_floats))
        gradients = () if attention.backward is None else attention.backward.tensor_gradients()
        bias = bias_of(inputs.bias, gradients, plane) if gradients else bias
    return bias


def mask_text(mask: Node) -> str:
    """Returns a mask tensor's shape and dtype in words, as ``a tensor 2x1x?x512 bool``; ``?`` is a dynamic size."""
    value = mask.meta["val"]
    shape = "x".join("?" if n is None else str(n) for n in map(layout.static, value.shape))
    return f"a tensor {shape} {str(value.dtype).removeprefix('torch.')}"


def _bias_gradient(attention: Attention) -> Sink | None:
    """The output for the gradient of the bias; None if there is none or the program does not use it."""
    sink = None if attention.backward is None else attention.backward.bias_gradient
    return None if sink is None or sink.used is None else sink


def _why_no_bias(mask: Node, plane: Sequence[layout.Dim], cause: Fallback) -> tuple[Reason, str]:
    """Why a mask tensor that was not recognised cannot be added to the scores either.

    The result is the given cause, unless the tensor has floats and only its dynamic sizes prevent the addition.
    """
    value = mask.meta["val"]
    if not value.dtype.is_floating_point or not may_broadcast(mask, plane):
        return cause.reason, cause.detail
    sizes = f"the mask has the sizes {list(value.shape)}, the scores {list(plane)}"
    return Reason.DYNAMIC_DIMS, f"{sizes}: whether these are the same is not known"


def mask_of(components: Components) -> Mask:
    """Returns the `Mask` that consists of these components.

    The tensors that it reads are numbered from 0, in the order in which `extras.extras` builds them.
    """
    numbers = itertools.count()

    def operand() -> Operand:
        return Operand(next(numbers))

    if components.documents is not None:
        return Mask(components.band, segments=Segments(operand(), operand(), VarlenLayout(operand(), operand())))
    found = []
    for component in components.in_order:
        kind, given = COMPONENTS[component.NAME], dict[str, Operand]()
        for name in kind.ROLES:
            if name in component.fields:
                given[name] = given[component.same[name]] if name in component.same else operand()
        found.append(kind(**dict.fromkeys(kind.ROLES) | given))
    return Mask(components.band, *found)


def intersect(bands: list[Band], q_len: int | None, kv_len: int | None) -> Band:
    """Returns the intersection of bands: the band of the (query, key) pairs that all of them show.

    Args:
        bands: the bands.
        q_len, kv_len: the numbers of queries and keys; None if dynamic.

    Raises:
        NotReadable: the intersection is empty, or the bands are anchored at different corners and a length is dynamic.
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
