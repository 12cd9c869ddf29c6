"""A tensor that is added to the scores as it is: what a mask argument is where it cannot be read as a mask.

Nothing is assumed of its values, so any such tensor may be one.  Graphs expand it to all batch elements and heads, and
on CUDA PyTorch pads its rows for alignment and slices them again; the kernels need neither and read the tensor before.
"""

from __future__ import annotations

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
from .pulls import Pull

aten = torch.ops.aten

_ALIASES = ("aten::alias", "aten::detach")


@dataclass(frozen=True)
class Bias:
    """A bias and what becomes of its gradient.

    Attributes:
        source: the place where the tensor is.
        gradient: the graph's gradient, [batch, q heads, q_len, kv_len], or its sum over `summed`; None without one.
        summed: over which dimensions of these the operator's result is summed.
        rest: over which others that result has to be summed to be `gradient`.
        slopes: the tensor has the slopes of ALiBi, of which the bias is made.
        pulls: the gradients of tensors that the bias is computed from, where the graph has them in place of the bias's;
            `gradient` is one of them then.
    """

    source: Argument
    gradient: Node | None = None
    summed: tuple[int, ...] = ()
    rest: tuple[int, ...] = ()
    slopes: bool = False
    pulls: tuple[Pull, ...] = ()

    @property
    def tensor(self) -> Node:
        """The node that is there now: 1 to 4 dimensions, which broadcast to the scores, or slopes."""
        found: Node = self.source.value
        return found

    def put(self, emitter: Emitter, result: Node, before: Node) -> list[tuple[Node, Node]]:
        """The gradients that the graph reads, and the nodes that take their places, made of the operator's `result`."""
        assert self.gradient is not None
        if self.rest:
            arguments = (result, list(self.rest), True)
            result = emitter.call(aten.sum.dim_IntList, arguments, before=before, like=self.gradient)
        if self.pulls:
            return [pull.put(emitter, result, before) for pull in self.pulls]
        return [(self.gradient, result)]


def find_bias(mask: Argument, gradient: Node | None, plane: Sequence[Dim]) -> Bias | None:
    """The bias of a site; None if kernels cannot read the tensor.

    Args:
        mask: the place of the mask that is added to the scores.
        gradient: the backward's output for it, if it is used.
        plane: the sizes of the scores, [batch, q heads, q_len, kv_len].
    """
    found = [place for place in _before_expansion(mask) if _broadcasts(place.value.meta["val"].shape, plane)]
    if not found or not mask.value.meta["val"].dtype.is_floating_point:
        return None
    if gradient is None:
        return Bias(found[-1])
    return _with_sum(Bias(found[-1], gradient))


def bias_of(place: Argument, pulls: tuple[Pull, ...], plane: Sequence[Dim]) -> Bias:
    """A bias of four dimensions with the gradients of tensors that it is computed from; `plane` as for `find_bias`."""
    size = place.value.meta["val"].shape
    one = [dim for dim in range(4) if sizes.static(size[dim]) == 1 and sizes.static(plane[dim]) != 1]
    summed, rest = (tuple(dim for dim in one if dim in dims) for dims in ((0, 1), (2, 3)))
    return Bias(place, pulls[0].gradient, summed, rest, pulls=pulls)


def may_broadcast(mask: Node, plane: Sequence[Dim]) -> bool:
    """Whether a mask broadcasts to the scores, [batch, q heads, q_len, kv_len], for some values of their sizes."""
    size = mask.meta["val"].shape
    pairs = zip(size[::-1], plane[::-1], strict=False)
    return len(size) <= len(plane) and not any(sizes.differ(a, b) and sizes.static(a) != 1 for a, b in pairs)


def _before_expansion(place: Argument) -> Iterator[Argument]:
    """The place, and the places of what its node is made of by expanding, or by padding and slicing again."""
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
    """Whether neighbours along the keys are neighbours in memory, or one element: a copy of it is of no use."""
    value: Tensor = node.meta["val"]
    return not value.dim() or sizes.static(value.stride(-1)) in (0, 1) or sizes.static(value.shape[-1]) == 1


def _padded(node: Node) -> Argument | None:
    """The place of the tensor behind which something was appended in the last dimension that this slice takes away."""
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


def _with_sum(bias: Bias) -> Bias:
    """The same bias with the graph's sum of its gradient over batch elements or heads, if nothing else reads it."""
    gradient = bias.gradient
    assert gradient is not None
    if len(gradient.users) != 1:
        return bias
    (user,) = gradient.users
    if op_name(user) != "aten::sum" or "dim" not in (args := bind(user)) or not args["keepdim"]:
        return bias
    total: Tensor = user.meta["val"]
    if not args["dim"] or total.dtype != gradient.meta["val"].dtype:
        return bias
    dims = {dim % 4 for dim in args["dim"]}
    if not dims & {0, 1}:
        return bias
    return Bias(bias.source, user, tuple(sorted(dims & {0, 1})), tuple(sorted(dims - {0, 1})))
