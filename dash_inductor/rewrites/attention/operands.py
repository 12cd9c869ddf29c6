"""The tensors that the new operators read, and the layouts in which they return what the rest of the graph expects."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...entries.attention_ops import Backend, is_attention_backward
from ...entries.repeat_kv import Reduction, Repeat, find_reduction, find_repeat, is_padded_repeat
from ...graph import sizes
from ...model.call import Order


@dataclass(frozen=True)
class Gradient:
    """One output of the backward.

    Attributes:
        order: dimensions from the largest stride to the smallest, as the graph's consumers expect; None if not dense.
        reduction: the graph's sum over a group that this output replaces; None where it replaces the old output itself.
    """

    order: Order | None
    reduction: Reduction | None = None


@dataclass(frozen=True)
class Operands:
    """Query, key and value of one site.  A forward that is alone has gradients that nobody asks for.

    Attributes:
        query, key, value: the graph's own operands of the backward.
        repeats: how key and value repeat smaller tensors, where those are read instead; None where the operands are.
        kv_heads: heads of the key and value that are read.
        gradients: dq, dk, dv.
        detail: a note for the record.
    """

    query: Node
    key: Node
    value: Node
    repeats: tuple[Repeat, Repeat] | None
    kv_heads: sizes.Dim
    gradients: tuple[Gradient, Gradient, Gradient]
    detail: str = ""


def output(node: Node, index: int) -> Node | None:
    """The getitem of an output that something uses."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index and user.users:
            return user
    return None


def find_operands(node: Node, backend: Backend, args: dict[str, Any]) -> Operands:
    """Operands of a site; repeated keys and values are looked through where their gradients allow it.

    Those of a packed operator are its own, of three dimensions, and so are its repeats.
    """
    query, key, value = args["query"], args["key"], args["value"]
    plain = tuple(_plain_gradient(node, backend, index) for index in range(3))
    if backend.packed:
        return Operands(query, key, value, None, key.meta["val"].shape[1], (plain[0], plain[1], plain[2]))
    found = find_repeat(key), find_repeat(value)
    if found[0] is None or found[1] is None:
        note = ""
        if is_padded_repeat(key) or is_padded_repeat(value):
            note = "key and value repeat heads, but are padded after that: the repeated tensors are read"
        elif found != (None, None):
            note = "only one of key and value repeats heads: the repeated tensor is read"
        return Operands(query, key, value, None, key.meta["val"].shape[1], (plain[0], plain[1], plain[2]), note)
    repeats = found[0], found[1]
    if any(repeat.loses_range for repeat in repeats):
        note = (
            f"key and value repeat heads, but are cast to {repeats[0].dtype} after that: the repeated tensors are read"
        )
        return Operands(query, key, value, None, key.meta["val"].shape[1], (plain[0], plain[1], plain[2]), note)
    summed = [_summed_gradient(node, index, repeat) for index, repeat in zip((1, 2), repeats, strict=True)]
    dk, dv = summed
    if dk is None or dv is None or repeats[0].kv_heads != repeats[1].kv_heads:
        note = "key and value repeat heads, but their gradients are used otherwise: the repeated tensors are read"
        return Operands(query, key, value, None, key.meta["val"].shape[1], (plain[0], plain[1], plain[2]), note)
    group = repeats[0].group
    note = f"key and value repeat each head {group} times: the tensors before that are read"
    return Operands(query, key, value, repeats, repeats[0].kv_heads, (plain[0], dk, dv), note)


def _plain_gradient(node: Node, backend: Backend, index: int) -> Gradient:
    if not is_attention_backward(node):  # a forward alone has none
        return Gradient((0, 1, 2, 3))
    used = output(node, index)
    value = node.meta["val"][index] if used is None else used.meta["val"]
    if not isinstance(value, torch.Tensor):  # this gradient is not wanted
        return Gradient((0, 1, 2, 3))
    value = backend.heads_first(value)
    return Gradient(sizes.dense_order(value.shape, value.stride()))


def _summed_gradient(node: Node, index: int, repeat: Repeat) -> Gradient | None:
    used = output(node, index) if is_attention_backward(node) else None
    if used is None:
        return Gradient((0, 1, 2, 3))
    reduction = find_reduction(used, repeat)
    if reduction is None:
        return None
    value = reduction.total.meta["val"]
    size, stride = list(value.shape), list(value.stride())
    if reduction.keepdim:
        del size[repeat.head + 1], stride[repeat.head + 1]
    own = sizes.dense_order(size, stride)
    if own is None:
        return None
    return Gradient(tuple(repeat.perm.index(d) for d in own), reduction)
