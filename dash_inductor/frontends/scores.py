"""Reads a `score_mod` of FlexAttention: it may scale a score, bound it, add to it and hide it; others are refused.

The function is read from its result inwards: choices of minus infinity, or of another number that hides the score, then
additions of values that do not depend on it, then a softcap ``c * tanh(s / c)``, innermost factors.  Known factors may
be anywhere inside the choices; those outside a sum multiply its parts.  Kernels apply these steps in the same
order.  Factors that are not known, such as a learned number for each head, stand innermost: query or key is multiplied
by them (see `factors`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..graph.nodes import bind, op_name
from .attention import NotReadable
from .mods import Mod, scalar, unread

CLOSE = 1e-6
"""Relative tolerance within which ``c * (1 / c)`` counts as one: floats have no exact ``1 / c``."""

_LOW = -1e9
"""A score at or below this number hides a key: no real score comes near it."""

ONLY_READ = "scores are replaced by a finite number, which is no bias where all keys of a query are hidden"
"""Why a mask that a finite number makes must be recognised: added to the scores it would give other results."""


def hides(fill: float, dtype: torch.dtype) -> bool:
    """Return whether scores that become `fill`, a number of this dtype, hide a key.

    That is minus infinity, a number at or below -1e9 as the dtype rounds it, or the dtype's lowest finite number.
    """
    return fill <= max(float(torch.tensor(_LOW, dtype=dtype)), torch.finfo(dtype).min)


CASTS = ("prims::convert_element_type", "aten::_to_copy", "aten::alias", "aten::clone", "aten::detach")
"""Conversions and copies.  The effect of a `detach` on gradients is read from the joint graph (`score_gradients`)."""


@dataclass(frozen=True)
class Added:
    """A value that is added to the score.

    Attributes:
        node: a node of the mod that does not depend on the score.
        factor: a known number by which it is multiplied: -1 if it is subtracted, times the factors of the sum.
    """

    node: Node
    factor: float


@dataclass(frozen=True)
class ScoreFactor:
    """A factor of the score that is not known.

    Attributes:
        node: a node of the mod that does not depend on the score.
        inverse: whether the score is divided by it.
    """

    node: Node
    inverse: bool


@dataclass(frozen=True)
class Hidden:
    """A condition under which a score_mod hides scores.

    Attributes:
        node: a bool node of the mod that does not depend on the score.
        where: the value of the condition for which the score is hidden.
        fill: what the score becomes, minus infinity or a number that `hides`.
    """

    node: Node
    where: bool
    fill: float


@dataclass(frozen=True)
class Score:
    """What a score_mod computes from a scaled score s: ``where(hidden, fill, cap * tanh(factor * s / cap) + added)``.

    Attributes:
        factor: the known factor of s.
        factors: further factors of s, which are not known.
        softcap: the softcap ``cap``; None without one: the result is then ``where(hidden, fill, factor * s + added)``.
        tanh: the node of the softcap's tanh; None without a softcap.
        added: the values that are added.
        hidden: the conditions, any of which hides the score.
    """

    factor: float = 1.0
    factors: tuple[ScoreFactor, ...] = ()
    softcap: float | None = None
    tanh: Node | None = None
    added: tuple[Added, ...] = ()
    hidden: tuple[Hidden, ...] = ()


def read_score(mod: Mod) -> Score:
    """Return a score_mod as a `Score`.

    Raises:
        NotReadable: it does not have this form, or computes scores in a dtype that is neither the query's nor float32.
    """
    _check_dtypes(mod)
    hidden, node = _hidden(mod, mod.result)
    added, outer = list[Added](), 1.0
    while True:
        factor, unknown, inner = factors_of(mod, node)
        found = _sum(mod, inner)
        if found is None:
            break
        if unknown:
            raise refused(mod, f"multiplies a sum by {mod.text(unknown[0].node)}, which is no known number")
        outer *= factor
        node, (part, sign) = found
        added.append(Added(part, sign * outer))
    factor, unknown, tanh, softcap = _bounded(mod, node, outer)
    return Score(factor, unknown, softcap, tanh, tuple(reversed(added)), tuple(hidden))


def _check_dtypes(mod: Mod) -> None:
    """Raise NotReadable if a score is rounded to a dtype other than the query's, or computed in float64."""
    for node in mod.scored:
        dtype = node.meta["val"].dtype
        if dtype.is_floating_point and dtype not in (mod.dtype, torch.float32):
            raise refused(mod, f"computes scores in {dtype}, where the query is {mod.dtype}")


def refused(mod: Mod, what: str) -> NotReadable:
    """Return the exception to raise for a mod, or a joint graph, that cannot be read.

    Args:
        mod: the mod, whose name and text begin the message.
        what: the rest of the sentence, for example "subtracts the score".
    """
    return unread(f"{mod.name}: {mod.text()} {what}")


def _hidden(mod: Mod, node: Node) -> tuple[list[Hidden], Node]:
    """Return the conditions that hide a score, and the node inside them."""
    found = list[Hidden]()
    while op_name(node := _uncast(node)) == "aten::where":
        condition, then, other = (bind(node)[name] for name in ("condition", "self", "other"))
        dtype = node.meta["val"].dtype
        fills = [(scalar(mod, side), where) for side, where in ((then, True), (other, False))]
        sides = [(fill, where) for fill, where in fills if fill is not None and hides(fill, dtype)]
        if condition in mod.scored or len(sides) != 1:
            raise refused(mod, f"chooses otherwise than between the score and minus infinity, or {_LOW:.0e} or less")
        ((fill, where),) = sides
        found.append(Hidden(condition, where, fill))
        node = other if where else then
    return found, node


def _uncast(node: Node) -> Node:
    """Return the node before conversions to floats, which kernels compute in float32."""
    while op_name(node) in CASTS and node.meta["val"].dtype.is_floating_point:
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def _sum(mod: Mod, node: Node) -> tuple[Node, tuple[Node, int]] | None:
    """Return the score, and the added part with its sign, of a sum; None if the node is not a sum."""
    name = op_name(node)
    if node not in mod.scored or name not in ("aten::add", "aten::sub"):
        return None
    args = bind(node)
    left, right = args["self"], args["other"]
    scored = [side in mod.scored for side in (left, right)]
    if all(scored) or args.get("alpha", 1) != 1 or not isinstance(left if scored[1] else right, Node):
        raise refused(mod, "adds otherwise than a number that does not depend on the score")
    if name == "aten::sub" and scored[1]:
        raise refused(mod, "subtracts the score")
    part = (left if scored[1] else right), -1 if name == "aten::sub" else 1
    return (right if scored[1] else left), part


def _bounded(mod: Mod, node: Node, behind: float) -> tuple[float, tuple[ScoreFactor, ...], Node | None, float | None]:
    """Return the known and the other factors of the score, the tanh of its softcap, and the softcap.

    behind: the product of the known factors outside of sums, by which all is multiplied.
    """
    outer, unknown, node = factors_of(mod, node)
    outer *= behind
    if node is mod.score:
        return _positive(mod, outer), unknown, None, None
    if op_name(node) != "aten::tanh":
        raise refused(mod, "is none of the forms that are read")
    if unknown:
        raise refused(mod, f"multiplies a softcap by {mod.text(unknown[0].node)}, which is no known number")
    tanh, source = node, node.args[0]
    assert isinstance(source, Node)
    inner, unknown, node = factors_of(mod, source)
    if node is not mod.score:
        raise refused(mod, "is none of the forms that are read")
    factor = outer * inner
    bound = abs(outer)
    if not 0.0 < bound < math.inf:
        raise refused(mod, f"multiplies by {outer}")
    return _positive(mod, 1.0 if math.isclose(factor, 1.0, rel_tol=CLOSE) else factor), unknown, tanh, bound


def _positive(mod: Mod, factor: float) -> float:
    if not 0.0 < factor < math.inf:
        raise refused(mod, f"multiplies by {factor}")
    return factor


def factors_of(mod: Mod, node: Node) -> tuple[float, tuple[ScoreFactor, ...], Node]:
    """Return the product of the known factors of a node, its other factors, and the node that all of them multiply.

    Args:
        mod: the mod, or its joint graph.
        node: a node that depends on the score.

    Raises:
        NotReadable: the node is divided by the score, or multiplied by something else than a number.
    """
    product, unknown = 1.0, list[ScoreFactor]()
    while True:
        node = _uncast(node)
        name = op_name(node)
        if name not in ("aten::mul", "aten::div", "aten::neg") or node not in mod.scored:
            return product, tuple(unknown), node
        if name == "aten::neg":
            product, node = -product, _only(node)
            continue
        args = bind(node)
        if args.get("rounding_mode") is not None:
            raise refused(mod, "divides otherwise than by a known number")
        left, right = args["self"], args["other"]
        if right in mod.scored:
            left, right = right, left
            if name == "aten::div":
                raise refused(mod, "divides by the score")
        number, is_quotient = scalar(mod, right), name == "aten::div"
        if number is None and right not in mod.scored and isinstance(right.meta.get("val"), torch.Tensor):
            unknown.append(ScoreFactor(right, is_quotient))
            node = left
            continue
        if number is None or (is_quotient and number == 0.0):
            raise refused(mod, "multiplies the score by something else than a number that does not depend on it")
        product, node = product / number if is_quotient else product * number, left


def _only(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source
