"""GQA that a model spells out: key or value repeated to the number of query heads before attention.

A repeat is ``expand`` along a new dimension right after the heads, then a view that merges both; in the backward, the
gradient is split again by a view and summed over that dimension.  Both may happen in any order of the other dimensions,
with permutations between them and the attention operator.

Under autocast the repeated tensor may have another dtype and be cast before attention, once.  A cast and a repeat give
the same values in either order, so the smaller tensor is cast instead.  The graph casts the gradient back per query
head and sums in the dtype of the smaller tensor; ours is summed in fp32, rounded once to the dtype of the attention and
then cast.  Casting bfloat16 to float32 is exact, so both are sums of fp32 numbers that were rounded to bfloat16: the
graph rounds every summand, we round the sum, whose error never exceeds the error bound of the graph's.  Casts to
float16 are not supported: a sum over the group may overflow there where the graph's own sum in float32 does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..graph.emit import Emitter
from ..graph.nodes import Argument, op_name
from ..graph.sizes import Dim, dense_order, same, same_all, specialised, static
from ..model.attention_spec import Order
from .attention import Axes, Sink

aten, prims = torch.ops.aten, torch.ops.prims

_VIEWS = ("aten::view", "aten::_unsafe_view", "aten::reshape")
_COPIES = ("aten::clone", "aten::alias", "aten::detach", "aten::contiguous")
_CAST = "prims::convert_element_type"


@dataclass(frozen=True)
class Repeat:
    """A tensor [batch, heads, length, head_dim] that repeats every head of a smaller one `group` times in a row.

    Attributes:
        source: the argument that holds the smaller tensor, in its own layout.
        squeeze: the dimension of size 1 that `base` has in addition to its four, or None.
        head: the dimension of the heads in the smaller tensor's own layout.
        perm: dimension d of the attention operand is dimension ``perm[d]`` of the smaller tensor's own layout.
        kv_heads, group: the number of heads of the smaller tensor, and how often each is repeated.
        dtype: the dtype of the operand; the smaller tensor may have another one.
    """

    source: Argument
    squeeze: int | None
    head: int
    perm: tuple[int, ...]
    kv_heads: int
    group: int
    dtype: torch.dtype

    @property
    def base(self) -> Node:
        """The node that now holds the tensor whose heads are repeated; rewrites of the graph may replace it."""
        found: Node = self.source.value
        return found

    def read(self, emitter: Emitter, before: Node) -> Node:
        """Return the key or value before its heads were repeated, with the operand's dimension order and dtype.

        Conversions that are needed (cast, squeeze, permute) are inserted before the node `before`.
        """
        base = node = self.base
        if node.meta["val"].dtype != self.dtype:
            node = emitter.call(prims.convert_element_type.default, (node, self.dtype), before=before, like=base)
        if self.squeeze is not None:
            node = emitter.call(aten.squeeze.dim, (node, self.squeeze), before=before, like=base)
        if self.perm != (0, 1, 2, 3):
            node = emitter.call(aten.permute.default, (node, list(self.perm)), before=before, like=base)
        return node

    @property
    def loses_range(self) -> bool:
        """Whether the cast to the operand's dtype may underflow: the dtype has a larger smallest normal number."""
        return torch.finfo(self.dtype).tiny > torch.finfo(self.base.meta["val"].dtype).tiny


@dataclass(frozen=True)
class Reduction:
    """The gradient of a tensor before its heads were repeated, which the graph sums over each group; implements `Sink`.

    Attributes:
        gradient: the sink of the gradient of the repeated operand.
        repeat: how the operand repeats the smaller tensor.
        total: the sum over the group (and the squeeze after it), in the layout of the smaller tensor.
        keepdim: whether the summed dimension remains, with size 1.
    """

    gradient: Sink
    repeat: Repeat
    total: Node
    keepdim: bool

    @property
    def axes(self) -> Axes | None:
        return None

    @property
    def used(self) -> Node | None:
        return self.gradient.used

    @property
    def users(self) -> list[Node]:
        return list(self.total.users)

    @property
    def order(self) -> Order | None:
        value = self.total.meta["val"]
        size, stride = list(value.shape), list(value.stride())
        if self.keepdim:
            del size[self.repeat.head + 1], stride[self.repeat.head + 1]
        own = dense_order(size, stride)
        return None if own is None else tuple(self.repeat.perm.index(d) for d in own)

    def put(self, emitter: Emitter, result: Node, before: Node) -> tuple[Node, Node]:
        repeat, total = self.repeat, self.total
        dtype = total.meta["val"].dtype
        if dtype != repeat.dtype:
            result = emitter.call(prims.convert_element_type.default, (result, dtype), before=before, like=total)
        if repeat.perm != (0, 1, 2, 3):
            inverse = [repeat.perm.index(d) for d in range(4)]
            result = emitter.call(aten.permute.default, (result, inverse), before=before, like=total)
        if self.keepdim:
            result = emitter.call(aten.unsqueeze.default, (result, repeat.head + 1), before=before, like=total)
        return total, result


@dataclass(frozen=True)
class Unused:
    """A gradient that nothing in the graph uses; implements `Sink`."""

    @property
    def axes(self) -> Axes | None:
        return "bhsd"

    @property
    def used(self) -> Node | None:
        return None

    @property
    def users(self) -> list[Node]:
        return []

    @property
    def order(self) -> Order | None:
        return (0, 1, 2, 3)

    def put(self, emitter: Emitter, result: Node, before: Node) -> tuple[Node, Node]:
        raise ValueError("nothing uses this gradient")


def find_repeat(operand: Node) -> Repeat | None:
    """Return how `operand` (key or value of an attention operator) repeats a smaller tensor; None if it does not."""
    perm: tuple[int, ...] = (0, 1, 2, 3)
    node = operand
    casts = 0
    while op_name(node) not in _VIEWS:
        step = _permutation(node)
        if step is not None:
            perm = tuple(step[d] for d in perm)
        elif op_name(node) not in (*_COPIES, _CAST):
            return None
        casts += op_name(node) == _CAST
        node = _input(node)
    head, merged = perm[1], _shape(node)
    node = _input(node)
    parts = _shape(node)
    if not _splits(merged, parts, head):
        return None
    while op_name(node) in (*_COPIES, _CAST):
        casts += op_name(node) == _CAST
        node = _input(node)
    if op_name(node) != "aten::expand" or casts > 1:
        return None
    base = _input(node)
    kv_heads, group = static(parts[head]), static(parts[head + 1])
    narrow = [*parts[: head + 1], 1, *parts[head + 2 :]]
    if kv_heads is None or group is None or not same_all(_shape(base), narrow):
        return None
    dtype = operand.meta["val"].dtype
    if not base.meta["val"].dtype.is_floating_point:
        return None
    if op_name(base) == "aten::unsqueeze" and same_all(_shape(_input(base)), _without(narrow, head + 1)):
        return Repeat(Argument(base, 0), None, head, perm, kv_heads, group, dtype)
    return Repeat(Argument(node, 0), head + 1, head, perm, kv_heads, group, dtype)


def is_padded_repeat(operand: Node) -> bool:
    """Return whether `operand` is a repeat whose head dim was padded afterwards, as PyTorch does for some head dims."""
    return op_name(operand) == "aten::constant_pad_nd" and find_repeat(_input(operand)) is not None


def find_sum(gradient: Sink, repeat: Repeat) -> Sink | None:
    """Return where the graph uses the gradient of k or v before its heads were repeated (a `Sink`).

    The graph computes this gradient as the sum over each group of query heads.  Return `Unused` if nothing uses the
    gradient; None if the graph does more with the repeated operand's gradient than sum it, or if the sum is not dense.

    Args:
        gradient: where the graph uses the gradient of the repeated operand.
        repeat: how the operand repeats the heads of the smaller tensor.
    """
    used = gradient.used
    if used is None:
        return Unused()
    found = _sum_of(used, repeat)
    if found is None:
        return None
    reduction = Reduction(gradient, repeat, *found)
    return None if reduction.order is None else reduction


def _sum_of(gradient: Node, repeat: Repeat) -> tuple[Node, bool] | None:
    """Return the sum over the group, and whether it keeps the dimension; None unless `gradient` is used by it alone."""
    perm: tuple[int, ...] = (0, 1, 2, 3)  # dimension i of `node` is dimension perm[i] of `gradient`
    node = gradient
    casts = 0
    while True:
        if len(node.users) != 1:
            return None
        user = next(iter(node.users))
        step = _permutation(user)
        if step is not None:
            perm = tuple(perm[d] for d in step)
        elif op_name(user) in _VIEWS:
            break
        elif op_name(user) not in (*_COPIES, _CAST):
            return None
        casts += op_name(user) == _CAST
        node = user
    if any(perm[repeat.perm[d]] != d for d in range(4)) or not _splits(_shape(node), _shape(user), repeat.head):
        return None
    node = user
    while len(node.users) == 1:
        user = next(iter(node.users))
        if op_name(user) == "aten::sum":
            return _whole_sum(user, repeat) if casts <= 1 else None
        if op_name(user) not in (*_COPIES, _CAST):
            return None
        casts += op_name(user) == _CAST
        node = user
    return None


def _whole_sum(total: Node, repeat: Repeat) -> tuple[Node, bool] | None:
    summed = total.args[0]
    assert isinstance(summed, Node)
    dims = total.args[1] if len(total.args) > 1 else None
    keepdim = bool(total.args[2]) if len(total.args) > 2 else bool(total.kwargs.get("keepdim", False))
    if not isinstance(dims, (list, tuple)) or list(dims) not in ([repeat.head + 1], [repeat.head + 1 - 5]):
        return None
    dtypes = {node.meta["val"].dtype for node in (total, summed, repeat.base)}
    if len(dtypes) > 1 or static(_shape(summed)[repeat.head]) != repeat.kv_heads:
        return None
    if keepdim and len(total.users) == 1:
        user = next(iter(total.users))
        if op_name(user) == "aten::squeeze" and user.args[1:] in ((repeat.head + 1,), ([repeat.head + 1],)):
            return user, False
    return total, keepdim


def _splits(merged: Sequence[Dim], parts: Sequence[Dim], head: int) -> bool:
    """Return whether `parts` is `merged` with dimension `head` split in two; guards fix dynamic sizes."""
    if len(merged) != 4 or len(parts) != 5:
        return False
    if not all(map(same, _without(merged, head), [*parts[:head], *parts[head + 2 :]])):
        return False
    heads, kv_heads, group = map(specialised, (merged[head], parts[head], parts[head + 1]))
    return heads is not None and kv_heads is not None and group is not None and heads == kv_heads * group


def _permutation(node: Node) -> tuple[int, ...] | None:
    """Return the permutation that a node is: its dimension i is dimension ``result[i]`` of the input.

    Return None if it is not one.
    """
    name = op_name(node)
    if name == "aten::permute":
        dims = node.args[1]
        assert isinstance(dims, (list, tuple))
        return tuple(int(d) % len(dims) for d in dims if isinstance(d, int))
    if name == "aten::transpose":
        a, b = node.args[1:]
        assert isinstance(a, int)
        assert isinstance(b, int)
        rank = len(_shape(node))
        order = list(range(rank))
        order[a], order[b] = order[b], order[a]
        return tuple(order)
    return None


def _input(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _shape(node: Node) -> Sequence[Dim]:
    value = node.meta.get("val")
    return value.shape if isinstance(value, torch.Tensor) else ()


def _without(dims: Sequence[Dim], index: int) -> list[Dim]:
    return [*dims[:index], *dims[index + 1 :]]
