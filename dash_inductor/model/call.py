"""`Call`: the description of one attention that stands in the graph, and the only one that is written as text."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from ..errors import ArgumentError
from .dropout import Dropout
from .mask import Mask, Operand

Order = tuple[int, ...]
"""The dimensions of a tensor from the largest stride to the smallest."""


@dataclass(frozen=True)
class Call:
    """What an operator of the graph computes, beside its tensors.

    ``str`` gives for example ``causal & keys(0)/scale=0.125/dropout=0.1,1/orders=0213,0213,0213``; `parse` reads it
    back.  Every graph dump and all generated code shows this text.

    Args:
        mask: who sees whom.
        scale: what the scores are multiplied with.
        orders: of the results that have a layout: of the output in a forward, of dq, dk and dv in a backward.  Empty
            where no operator is called yet.
        dropout: what drops probabilities at random; None where nothing does.
    """

    mask: Mask
    scale: float
    orders: tuple[Order, ...] = ()
    dropout: Dropout | None = None

    def __post_init__(self) -> None:
        for order in self.orders:
            if sorted(order) != list(range(4)):
                raise ArgumentError("orders", self.orders, "permutations of 0, 1, 2, 3")

    def __hash__(self) -> int:  # launches look calls and plans up in caches
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mask, self.scale, self.orders, self.dropout))

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors of the operator's list `extras` that are read, each once."""
        return self.mask.operands if self.dropout is None else (*self.mask.operands, self.dropout.seed)

    def __str__(self) -> str:
        orders = ",".join("".join(map(str, order)) for order in self.orders)
        dropout = "" if self.dropout is None else f"/dropout={self.dropout}"
        return f"{self.mask}/scale={self.scale!r}{dropout}" + (f"/orders={orders}" if orders else "")

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Call:
        """Inverse of ``str``.

        Raises:
            ArgumentError: the text was not made by ``str(Call)``.
        """
        match = re.fullmatch(r"([^/]+)/scale=([^/]+?)(?:/dropout=([^/]+))?(?:/orders=([0-3,]+))?", text)
        if match is None:
            raise ArgumentError("call", text, "a string made by str(Call)")
        try:
            scale = float(match[2])
        except ValueError as error:
            raise ArgumentError("call", text, "a string made by str(Call)") from error
        orders = tuple(tuple(map(int, order)) for order in match[4].split(",")) if match[4] else ()
        return Call(Mask.parse(match[1]), scale, orders, Dropout.parse(match[3]) if match[3] else None)
