"""Attention biases: float tensors that are added to the scores, including additive masks that no reader recognises.

The kernels assume nothing of a bias's values, so any float mask can be read as one.  Graphs expand the tensor to all
batch elements and heads, and on CUDA PyTorch pads its rows for alignment and slices the padding off again.  The kernels
need neither and read the tensor before these steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph import sizes
from ..graph.emit import Emitter
from ..graph.nodes import Argument, bind, op_name
from ..graph.sizes import Dim
from .attention import Sink, TensorGradient

aten, prims = torch.ops.aten, torch.ops.prims

_ALIASES = ("aten::alias", "aten::detach")


@dataclass(frozen=True)
class FoundBias:
    """A bias, and how the graph uses its gradient.

    Attributes:
        source: the argument that holds the tensor.
        sink: the sink of the graph's gradient of the bias, [batch, q heads, q_len, kv_len]; None without one.
        total: the graph's sum of that gradient, which is replaced instead of the sink; None if the sink itself is read.
        summed: those of the dimensions 0 (batch) and 1 (heads) over which this package's backward sums the gradient.
        rest: the further dimensions over which the backward's result must be summed to equal `gradient`.
        tensor_gradients: the gradients of tensors from which the bias is computed, if the graph has these instead of
            the gradient of the bias; `gradient` is then one of them.
    """

    source: Argument
    sink: Sink | None = None
    total: Node | None = None
    summed: tuple[int, ...] = ()
    rest: tuple[int, ...] = ()
    tensor_gradients: tuple[TensorGradient, ...] = ()

    @property
    def tensor(self) -> Node:
        """The node that now holds the bias, which has 1 to 4 dimensions and broadcasts to the scores."""
        found: Node = self.source.value
        return found

    @property
    def gradient(self) -> Node | None:
        """The graph's node of the bias's gradient, or of the gradient's sum; None if the graph uses neither."""
        return self.total if self.total is not None or self.sink is None else self.sink.used

    def put(self, emitter: Emitter, result: Node, before: Node) -> list[tuple[Node, Node]]:
        """Return (gradient that the graph reads, its replacement) pairs; replacements are computed from `result`.

        Args:
            emitter: adds nodes.
            result: the gradient of the bias from this package's backward, summed over `summed`.
            before: the node before which nodes are added.
        """
        if self.total is None:
            assert self.sink is not None
            swap = self.sink.put(emitter, result, before)
            return [] if swap is None else [swap]
        if self.rest:
            arguments = (result, list(self.rest), True)
            result = emitter.call(aten.sum.dim_IntList, arguments, before=before, like=self.total)
        if self.tensor_gradients:
            return [found.put(emitter, result, before) for found in self.tensor_gradients]
        dtype = self.total.meta["val"].dtype
        if result.meta["val"].dtype != dtype:
            result = emitter.call(prims.convert_element_type.default, (result, dtype), before=before, like=self.total)
        return [(self.total, result)]


def find_bias(mask: Argument, gradient: Sink | None, plane: Sequence[Dim]) -> FoundBias | None:
    """Return the bias of an attention; None if the kernels cannot read the tensor.

    Args:
        mask: the argument that holds the mask, which is added to the scores.
        gradient: the sink of the backward's gradient of the mask, if it is used.
        plane: the shape of the scores, [batch, q heads, q_len, kv_len].
    """
    found = [place for place in _before_expansion(mask) if _broadcasts(place.value.meta["val"].shape, plane)]
    if not found or not mask.value.meta["val"].dtype.is_floating_point:
        return None
    if gradient is None:
        return FoundBias(found[-1])
    return _with_sum(found[-1], gradient)


def bias_of(place: Argument, gradients: tuple[TensorGradient, ...], plane: Sequence[Dim]) -> FoundBias:
    """Return a bias whose gradient the graph needs only to compute gradients of other tensors.

    Args:
        place: the argument that holds the bias, four dimensions.
        gradients: the gradients of the tensors from which the bias is computed.
        plane: the shape of the scores, [batch, q heads, q_len, kv_len].
    """
    size = place.value.meta["val"].shape
    one = [dim for dim in range(4) if sizes.static(size[dim]) == 1 and sizes.static(plane[dim]) != 1]
    summed, rest = (tuple(dim for dim in one if dim in dims) for dims in ((0, 1), (2, 3)))
    return FoundBias(place, total=gradients[0].gradient, summed=summed, rest=rest, tensor_gradients=gradients)


def may_broadcast(mask: Node, plane: Sequence[Dim]) -> bool:
    """Return whether a mask may broadcast to scores [batch, q heads, q_len, kv_len], whose sizes may be dynamic."""
    size = mask.meta["val"].shape
    pairs = zip(size[::-1], plane[::-1], strict=False)
    return len(size) <= len(plane) and not any(sizes.differ(a, b) and sizes.static(a) != 1 for a, b in pairs)


def _before_expansion(place: Argument) -> Iterator[Argument]:
    """Yield the argument, then those that hold the tensor before expansion, or before padding and slicing."""
    while True:
        yield place
        node: Node = place.value
        name = op_name(node)
        if name in _ALIASES or name == "aten::expand" or (name == "aten::clone" and _is_fast_to_read(node.args[0])):
            place = Argument(node, 0)
        elif name == "aten::slice" and (padded := _padded(node)) is not None:
            place = padded
        else:
            return


def _is_fast_to_read(node: Any) -> bool:
    """Return whether elements along the keys are contiguous or all the same, so that a copy gains nothing."""
    value: Tensor = node.meta["val"]
    return not value.dim() or sizes.static(value.stride(-1)) in (0, 1) or sizes.static(value.shape[-1]) == 1


def _padded(node: Node) -> Argument | None:
    """Return the argument that holds the tensor before a pad whose added elements `node`, a slice, cuts off again.

    Only padding at the end of the last dimension counts; return None for any other slice.
    """
    args = bind(node)
    pad = args["self"]
    if op_name(pad) != "aten::constant_pad_nd":
        return None
    found = bind(pad)
    source, amounts = found["self"], found["pad"]
    size = source.meta["val"].shape
    whole = args["start"] in (None, 0) and args["step"] == 1 and args["dim"] in (-1, len(size) - 1)
    appended = len(amounts) == 2 and isinstance(amounts[0], int) and amounts[0] == 0
    return Argument(pad, "self") if whole and appended and sizes.same_all(node.meta["val"].shape, size) else None


def _broadcasts(size: Sequence[Dim], plane: Sequence[Dim]) -> bool:
    if not 1 <= len(size) <= len(plane):
        return False
    pairs = zip(size, plane[len(plane) - len(size) :], strict=True)
    return all(sizes.static(a) == 1 or sizes.same(a, b) for a, b in pairs)


def _with_sum(source: Argument, sink: Sink) -> FoundBias:
    """Return the bias with the graph's sum of its gradient over batch elements or heads, if only that sum reads it."""
    bias, gradient, users = FoundBias(source, sink), sink.used, sink.users
    assert gradient is not None
    if len(users) != 1 or sink.axes != "bhsd":  # else the sum's dimensions have another meaning
        return bias
    (user,) = users
    if op_name(user) != "aten::sum" or "dim" not in (args := bind(user)) or not args["keepdim"]:
        return bias
    total: Tensor = user.meta["val"]
    if not args["dim"] or total.dtype != gradient.meta["val"].dtype or total.dim() != 4:
        return bias
    dims = {dim % 4 for dim in args["dim"]}
    summed, rest = dims & {0, 1}, dims - {0, 1}
    if not summed or (rest and _is_small(gradient.meta["val"], summed)):
        return bias
    return FoundBias(source, sink, user, tuple(sorted(summed)), tuple(sorted(rest)))


def _is_small(gradient: Tensor, summed: set[int]) -> bool:
    """Return whether a gradient takes less memory than the fp32 buffer and the result of its sum over `summed`."""
    addends = [sizes.static(gradient.shape[dim]) for dim in summed]
    return None not in addends and math.prod(filter(None, addends)) * gradient.itemsize < 4 + gradient.itemsize
