"""Reads a mask tensor back: from the producers of `attn_mask` / `attn_bias` to a diagonal band.

The producer chain is interpreted exactly (`mask_reader`), which gives visibility as a decision tree over the query and
key position.  Each path to "visible" is an interval of ``d = q - kv``; if their union is one interval, that is the
band (`bands`). The band is then compared with values that the graph's own operators compute (`verification`), so that a
misreading can cost a replacement but never give a wrong one.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from ..model.mask import MAX_LENGTH, Band
from . import arithmetic_ops, index_ops, mask_ops, reduce_ops, verification
from .bands import Scores, require_visible_keys, to_band, visibility
from .index_expr import NotRecognised
from .mask_reader import (
    MAX_ENTRIES,
    MaskReader,
    Position,
    is_size,
    meta_of,
    producers,
    shape_env_of,
    shape_of,
)

MaskReason = Literal["depends_on_input", "not_a_band", "unknown_op", "value_mismatch"]

RULES = index_ops.RULES | mask_ops.RULES | arithmetic_ops.RULES | reduce_ops.RULES


@dataclass(frozen=True)
class MaskResult:
    """What a mask tensor is.

    Args:
        band: the mask in normal form; None if it is not recognised.
        reason: why not: its producers reach a tensor input of the graph ("depends_on_input"), it is something else
            than a diagonal band ("not_a_band"), an operator has no rule ("unknown_op"), or the values that the graph
            computes are not those of the band, or could not be checked ("value_mismatch").
        detail: the node, operator or condition that decided.
    """

    band: Band | None
    reason: MaskReason | None = None
    detail: str = ""


class _Known:
    """What is known of one graph: numbers of producer chains (equal chains share one), and the results."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.results: dict[Any, MaskResult] = {}


_known: weakref.WeakKeyDictionary[Graph, _Known] = weakref.WeakKeyDictionary()


def recognise(node: Node, *, query: Node, key: Node) -> MaskResult:
    """The band that a mask tensor means.

    Every layer of a model may build its own copy of a mask; equal producer chains of one graph are read once.

    Args:
        node: mask of an attention node in a joint graph, any shape that broadcasts to ``[B, H, q_len, kv_len]``: bool
            (True is visible), or added to the scores (0 is visible; -inf, or at most half of the type's lowest number,
            is not).
        query, key: the attention node's query ``[B, H, q_len, D]`` and key ``[B, H_kv, kv_len, D]``; only shapes are
        read.

    Returns:
        The band, or the reason why there is none.  For static lengths the band is anchored top left and a bound that
        excludes nothing is None; for dynamic lengths a mask that follows ``kv_len - q_len`` is anchored bottom right.
    """
    with _disable_current_modes(), torch.no_grad():
        try:
            chain = producers(node)
            known = _known.setdefault(node.graph, _Known())
            plane = (*shape_of(query)[:-1], shape_of(key)[-2])
            memo_key = (_number(chain, known.numbers), plane)
        except NotRecognised as e:
            return MaskResult(None, cast(MaskReason, e.reason), e.detail)
        if memo_key not in known.results:
            known.results[memo_key] = _read(node, chain, plane)
        return known.results[memo_key]


def _read(node: Node, chain: list[Node], plane: Position) -> MaskResult:
    """`plane` is the shape of the scores, [B, H, q_len, kv_len]."""
    try:
        shape_env = shape_env_of(chain)
        reader = MaskReader(RULES, shape_env)
        for extent, largest in zip(plane, (MAX_ENTRIES, MAX_ENTRIES, MAX_LENGTH, MAX_LENGTH), strict=True):
            reader.algebra.limit(extent, largest)
        shape = shape_of(node)
        full = plane[len(plane) - len(shape) :]
        if len(shape) > len(plane) or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
            raise NotRecognised("not_a_band", f"{node.name} has shape {list(shape)}, the scores {list(plane)}")
        position = tuple(reader.algebra.index(name, n) for name, n in zip(("b", "h", "q", "kv"), plane, strict=True))
        scores = Scores(reader.algebra, *plane[-2:], *position[-2:])
        value = reader.operand(node, position)
        visible, infinite = visibility(scores, value, meta_of(node).dtype)
        band = to_band(scores, visible)
        if not infinite:
            require_visible_keys(scores, band)
        verification.verify(node, chain, band, plane, shape_env)
    except NotRecognised as e:
        return MaskResult(None, cast(MaskReason, e.reason), e.detail)
    except RecursionError:
        return MaskResult(None, "unknown_op", f"{node.name} is computed in too many steps")
    return MaskResult(band)


def _number(chain: list[Node], numbers: dict[Any, int]) -> int:
    """A number for the last node of the chain; equal chains get equal numbers.

    Equal means: the same operators on the same constants and the same expressions of size symbols.  What is no part of
    the chain is a tensor that lends its shape and type to a creation operator, and these are those of the result.
    """
    local: dict[Node, int] = {}

    def token(value: Any) -> Any:
        if isinstance(value, Node):
            return ("node", local[value]) if value in local else "shape and type"
        if isinstance(value, (list, tuple)):
            return tuple(token(v) for v in value)
        return type(value).__name__, str(value)

    for node in chain:
        if is_size(node):
            described: Any = ("size", str(node.meta["val"]))
        else:
            arguments = (tuple(token(a) for a in node.args), tuple((k, token(v)) for k, v in node.kwargs.items()))
            described = (str(node.target), arguments, shape_of(node), str(meta_of(node).dtype))
        local[node] = numbers.setdefault(described, len(numbers))
    return local[chain[-1]]
