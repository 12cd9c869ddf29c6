"""Packed documents whose ids are counted from position ids: a document begins where positions do not increase by 1.

Model code derives packed documents in this way: the id of a token's document is the running count of the tokens i with
``position[i] - position[i - 1] != 1``.  It then lets a query see the keys of its document whose position is at most its
own.  Between two tokens with the same id, all steps are 1, so their positions differ by as much as their indices, and
the condition on positions is equivalent to one on indices.

This holds if the graph's own arithmetic on positions does not overflow, which is undefined for signed integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..graph.nodes import bind, op_name
from .index_expr import Algebra, NotRecognised, Value, assume, same
from .nodes import Position, meta_of, shape_of
from .reader import MaskReader, Rule, Way
from .token_data import Load, LoadIndex, Loads

LARGEST = 2**61
"""The largest magnitude assumed for positions; the sum of two of them does not overflow int64."""


class Restarts:
    """Proves by how much position ids of a query and of a key in the same packed document differ.

    Args:
        rules: the rules of the mask reader.
        shape_env: the shape environment of the graph; None for static sizes.
    """

    def __init__(self, rules: Mapping[str, Rule], shape_env: ShapeEnv | None) -> None:
        self._rules = dict(rules)
        self._shape_env = shape_env

    def difference(self, number: Load, of_query: Load, of_key: Load) -> tuple[int, Load] | None:
        """Return (c, position ids) with ``of_query[i] - of_key[j] == i - j + c`` for all tokens i, j of one document.

        Return None if no c is proved.

        Args:
            number: the document ids: tokens with equal ids belong to one document.  They are counted from the position
                ids.
            of_query, of_key: the compared numbers of a query and of a key.
        """
        for position in (of_key, of_query):
            try:
                documents = _Documents(position, Algebra(self._shape_env), self._rules)
                documents.require_count(number)
                return documents.beyond(of_query) - documents.beyond(of_key), position
            except NotRecognised:
                continue
        return None


class _Documents(Loads):
    """Values computed from one vector of positions, see `Loads`: all loads are elements of that vector."""

    def __init__(self, position: Load, algebra: Algebra, rules: dict[str, Rule]) -> None:
        self._algebra, self._node = algebra, position.node
        self._has_entries = "b" in position.axes
        extents = dict(zip((index.axis for index in position.indices), shape_of(position.node), strict=True))
        (token,) = position.axes - {"b"}
        self._entry = algebra.index("b", extents["b"]) if self._has_entries else sympy.S.Zero
        self._token = algebra.index("token", extents[token])
        self._found: dict[Position, tuple[Load, sympy.Symbol]] = {}
        self._reader = MaskReader(rules, algebra, self, Way("from positions alone"))
        here = self._place_of(position)
        before = tuple(sympy.expand(at - 1) if at == self._token else at for at in here)
        self._here, self._before = (self.symbol(self._load(at)) for at in (here, before))

    def find(self, node: Node, position: Position) -> Load | None:
        return self._load(position) if node is self._node else None

    def symbol(self, load: Load) -> sympy.Symbol:
        return next(symbol for known, symbol in self._found.values() if known == load)

    def require_count(self, number: Load) -> None:
        """Raise NotRecognised unless `number` counts the tokens at which positions do not increase by 1."""
        node, place = number.node, self._place_of(number)
        if op_name(node) == "aten::cumsum" and meta_of(node).dtype == torch.int64:
            args: dict[str, Any] = bind(node)
            if meta_of(args["self"]).dtype == torch.bool and place[args["dim"]] == self._token:
                begins = self._reader.load(args["self"], place)
                # Whether the first token begins a document makes no difference.
                begins = assume(begins, self._token - 1, True)
                expected = self._algebra.lift(_negated, self._algebra.equal_zero(self._here - self._before - 1))
                if same(begins, expected):
                    return
        raise NotRecognised("depends_on_input", f"{node.name} does not count where positions begin anew")

    def beyond(self, load: Load) -> int:
        """Return the constant difference between the number that `load` reads for a token and the token's position.

        Raises:
            NotRecognised: the difference is not constant.
        """
        value = self._reader.load(load.node, self._place_of(load))
        more = sympy.expand(value - self._here) if isinstance(value, sympy.Expr) else None
        if more is None or not more.is_Integer:
            raise NotRecognised("depends_on_input", f"{load.node.name} is more than a position and a number")
        return int(more)

    def _load(self, position: Position) -> Load:
        if position not in self._found:
            load = Load(self._node, (LoadIndex(None, len(self._found)),))
            symbol = self._algebra.data(-LARGEST, LARGEST, frozenset({self._token}))
            self._found[position] = load, symbol
        return self._found[position][0]

    def _place_of(self, load: Load) -> Position:
        """Return the index at which `load` reads for a token, one expression per dimension."""
        if "b" in load.axes and not self._has_entries:
            raise NotRecognised("depends_on_input", f"{self._node.name} has the same positions for all batch entries")
        at = {None: sympy.S.Zero, "b": self._entry}
        return tuple(sympy.expand(at.get(index.axis, self._token) + index.start) for index in load.indices)


def _negated(x: object) -> Value:
    return not x
