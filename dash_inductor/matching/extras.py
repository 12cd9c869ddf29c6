"""The tensors that a mask names by their place in the operators' list `extras`, as nodes of the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from . import layout, predicates
from .emit import Emitter
from .sites import Match

aten = torch.ops.aten


def extras(emitter: Emitter, match: Match, before: Node) -> list[Node]:
    """What the call's mask reads, in front of `before`; layers with the same mask share what does not name a size."""
    if match.terms.keys is None:
        return []
    return [_expanded(emitter, _valid_keys(emitter, match, before), match, before)]


def _valid_keys(emitter: Emitter, match: Match, before: Node) -> Node:
    """The validity of keys, where all layers find it."""
    assert match.terms.keys is not None
    assert match.backend.mask is not None
    like = match.args[match.backend.mask]

    def call(operator: Any, args: tuple[Any, ...]) -> Node:
        return emitter.shared(operator, args, before=before, like=like)

    valid = predicates.compute(match.terms.keys, "kv", call, lambda node: node)
    assert isinstance(valid, Node)
    return valid


def _expanded(emitter: Emitter, vector: Node, match: Match, before: Node) -> Node:
    """[batch, kv_len] of a tensor that has size 1 where it does not change."""
    query, key = match.operands.query, match.operands.key
    sizes: list[Any] = []
    for d, (tensor, dim) in enumerate(((query, 0), (key, 2))):
        size = tensor.meta["val"].shape[dim]
        if layout.same(vector.meta["val"].shape[d], size):
            sizes.append(-1)
        elif layout.static(size) is not None:
            sizes.append(layout.static(size))
        else:
            sizes.append(emitter.call(aten.sym_size.int, (tensor, dim), before=before, like=tensor))
    if sizes == [-1, -1]:
        return vector
    return emitter.call(aten.expand.default, (vector, sizes), before=before, like=vector)
