"""Recognises a mask tensor: from the producers of `attn_mask` / `attn_bias` to the components of its normal form.

The producer chain is interpreted exactly (`reader`), which gives visibility as a decision tree over the query and key
position and over data that the graph computes.  The tree is split into a band, components such as segment ids, and key
validity (`normal_form`): each path to "visible" is an interval of ``d = q - kv``, and if their union is one interval,
that is the band (`bands`).  Any other mask may be read as a dense one.

The components are then compared with values that the graph's own operators compute (`verification`), as a safety net
for the exact interpretation; by itself this comparison would prove nothing about data.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch.fx import Graph, Node

from ..graph.nodes import op_name
from ..model.mask import MAX_LENGTH, Band
from ..upstream.dispatch import disable_current_modes
from . import verification
from .bands import Scores, visibility
from .index_expr import Algebra, NotRecognised
from .nodes import Position, is_data, is_size, meta_of, producers, rule_name, shape_env_of, shape_of
from .normal_form import Components, components, require_visible_keys
from .reader import MAX_ENTRIES, MaskReader, Way
from .restarts import Restarts
from .rules import (
    arithmetic as arithmetic_ops,
)
from .rules import (
    elementwise as mask_ops,
)
from .rules import (
    indexing as index_ops,
)
from .rules import (
    reductions as reduce_ops,
)
from .token_data import Loads

log = logging.getLogger("dash_inductor")

MOST_NAMES = 12
"""The maximum number of operators that the description of a reading names."""

_WAYS = (
    Way("as a band with vectors of data"),
    Way("as a band with vectors of data and of positions", vectors=True),
    Way("as a band with intervals of keys", intervals=True),
    Way("as a band with intervals of keys, of positions and by head", intervals=True, positions=True),
    Way("with planes of data", dense=True),
    Way("with planes of data, as large as possible", dense=True, planes=True),
    Way("with planes of data and of positions", dense=True, all_planes=True),
)
"""The strategies in the order in which they are tried; as little as possible of a mask becomes dense."""

MaskReason = Literal["depends_on_input", "not_a_band", "unknown_op", "value_mismatch"]

RULES = index_ops.RULES | mask_ops.RULES | arithmetic_ops.RULES | reduce_ops.RULES


@dataclass(frozen=True)
class MaskResult:
    """The result of reading a mask tensor.

    Args:
        components: the mask in normal form; None if it is not recognised.
        reason: why it is not recognised: it depends on data in a way that the components cannot express
            ("depends_on_input"), its dependence on positions is not a band ("not_a_band"), an operator has no rule
            ("unknown_op"), or the values that the graph computes differ from the components or could not be checked
            ("value_mismatch").
        detail: the node, operator or condition that is the cause.
        how: a description of how the components were read and verified.
    """

    components: Components | None
    reason: MaskReason | None = None
    detail: str = ""
    how: str = field(default="", compare=False)

    @staticmethod
    def refused(cause: NotRecognised) -> MaskResult:
        """Return the result for a mask that is not recognised, with the reason and the detail of `cause`."""
        return MaskResult(None, cast(MaskReason, cause.reason), cause.detail)

    @property
    def band(self) -> Band | None:
        """The band of the mask; None if it is not recognised."""
        return None if self.components is None else self.components.band


class _Known:
    """What is known of one graph: numbers of producer chains (equal chains share one), and the results.

    The results reference nodes, and so keep the graph alive until `forget` drops them.
    """

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.results: dict[Any, tuple[MaskResult, dict[Node, int]]] = {}


_known: weakref.WeakKeyDictionary[Graph, _Known] = weakref.WeakKeyDictionary()


def recognise(node: Node, *, query: Node, key: Node, beside: bool = False) -> MaskResult:
    """Return the components of a mask tensor.

    Every layer of a model may build its own copy of a mask; equal producer chains of one graph are read once.

    Args:
        node: the mask of an attention node in a joint graph, any shape that broadcasts to ``[B, H, q_len, kv_len]``:
            bool (True is visible), or added to the scores (0 is visible; -inf and the dtype's lowest finite number are
            hidden: Note [Finite values that hide] in `bands`).
        query, key: the attention node's query ``[B, H, q_len, D]`` and key ``[B, H_kv, kv_len, D]``; only their shapes
            are read.
        beside: whether every query has an additional score, such as a sink, that no mask hides.  A finite value may
            then hide all keys of a query as well.

    Returns:
        The components, which read nodes that `node` is computed from, or the reason why there are none.  For static
        lengths the band is anchored top left and a bound that excludes nothing is None; for dynamic lengths a mask that
        follows ``kv_len - q_len`` is anchored bottom right.
    """
    with disable_current_modes(), torch.no_grad():
        try:
            chain = producers(node, RULES)
            known = _known.setdefault(node.graph, _Known())
            plane = (*shape_of(query)[:-1], shape_of(key)[-2])
            numbers = _numbers(chain, known.numbers)
        except NotRecognised as e:
            return MaskResult.refused(e)
        memo_key = (numbers[node], plane, beside)
        if memo_key not in known.results:
            known.results[memo_key] = _read(node, chain, plane, beside), numbers
        result, numbered = known.results[memo_key]
        if result.components is None or numbered is numbers:
            return result
        own = {number: n for n, number in numbers.items()}
        return replace(result, components=result.components.renamed(lambda other: own[numbered[other]]))


def forget(graph: Graph) -> None:
    """Drop the cached results of reading a graph's masks, which keep the graph alive; call it after the last mask."""
    _known.pop(graph, None)


def _read(node: Node, chain: list[Node], plane: Position, beside: bool) -> MaskResult:
    """Read a mask by the first strategy that succeeds; `plane` is the shape of the scores, [B, H, q_len, kv_len].

    A mask that is not a band with vectors of data may be a band with a dense mask.
    """
    cause = None
    of_data = is_data(node, RULES, {})
    for way in _WAYS:
        only_of_data = (way.intervals and not way.positions) or (way.dense and not way.all_planes)
        if only_of_data and not of_data:
            continue
        try:
            found, verified = _components(node, chain, plane, way, of_data, beside)
            return MaskResult(found, how=f"{_read_through(chain)}; {verified}")
        except NotRecognised as e:
            log.debug("mask %s, read %s: %s: %s", node.name, way.words, e.reason, e.detail)
            cause = cause or e
            if e.reason == "value_mismatch":
                break
        except RecursionError:
            return MaskResult(None, "unknown_op", f"{node.name} is computed in too many steps")
    assert cause is not None
    return MaskResult.refused(cause)


def _read_through(chain: list[Node]) -> str:
    """Describe how many operators were read, and which."""
    names = [op_name(node).partition("::")[2] for node in chain if op_name(node) in RULES]
    kinds = list(dict.fromkeys(names))
    shown = ", ".join(kinds[:MOST_NAMES]) + (", ..." if len(kinds) > MOST_NAMES else "")
    return f"read back through {len(names)} operator{'' if len(names) == 1 else 's'} ({shown})"


def _components(
    node: Node, chain: list[Node], plane: Position, way: Way, of_data: bool, beside: bool
) -> tuple[Components, str]:
    """Return the components of a mask, read in this way, and a description of their verification.

    Args:
        node: the mask.
        chain: its producers.
        plane: the shape of the scores, [B, H, q_len, kv_len].
        way: the strategy.
        of_data: whether the mask depends on data.
        beside: see `recognise`.
    """
    shape_env = shape_env_of(chain)
    algebra = Algebra(shape_env)
    for extent, largest in zip(plane, (MAX_ENTRIES, MAX_ENTRIES, MAX_LENGTH, MAX_LENGTH), strict=True):
        algebra.limit(extent, largest)
    shape = shape_of(node)
    full = plane[len(plane) - len(shape) :]
    if len(shape) > len(plane) or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        raise NotRecognised("not_a_band", f"{node.name} has shape {list(shape)}, the scores {list(plane)}")
    position = tuple(algebra.index(name, n) for name, n in zip(("b", "h", "q", "kv"), plane, strict=True))
    if not way.dense:
        algebra.tell_apart(position[2], position[3])
    sizes = frozenset(n for n in (plane[0], *plane[-2:]) if n.is_Symbol)
    scores = Scores(algebra, plane[2], plane[3], position[2], position[3], sizes, position[1])
    loads = Loads(algebra, plane, position, way.dense, way.positions)
    value = MaskReader(RULES, algebra, loads, way).operand(node, position)
    visible, infinite = visibility(scores, value, meta_of(node).dtype)
    restarts = None if way.dense else Restarts(RULES, shape_env)
    found = components(scores, visible, loads, restarts, of_data=of_data, of_positions=way.positions)
    if not infinite and not beside:
        require_visible_keys(scores, found)
    log.debug("mask %s, read %s: %s", node.name, way.words, found)
    return found, verification.verify(node, chain, found, plane, shape_env, RULES)


def _numbers(chain: list[Node], numbers: dict[Any, int]) -> dict[Node, int]:
    """Return a number for every node of the chain; nodes with equal chains get equal numbers.

    Chains are equal if they have the same operators on the same constants, the same expressions of size symbols and the
    same nodes at their ends.  A tensor that only provides its shape and dtype to a creation operator is not part of the
    chain; the result has both of them.
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
        elif rule_name(node) not in RULES:
            described = ("node", node.name)  # it may be random
        else:
            arguments = (tuple(token(a) for a in node.args), tuple((k, token(v)) for k, v in node.kwargs.items()))
            described = (str(node.target), arguments, shape_of(node), str(meta_of(node).dtype))
        local[node] = numbers.setdefault(described, len(numbers))
    return local
