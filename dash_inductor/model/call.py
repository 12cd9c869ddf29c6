"""`Call`, the specification of one attention, and its text form, which is an argument of the operators in the graph."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace

from ..errors import ArgumentError
from .dropout import Dropout
from .mask import Mask
from .terms import Operand
from .traits import Traits

Order = tuple[int, ...]
"""The dimensions of a tensor, from the largest stride to the smallest."""

MODIFIERS = ("softcap",)
"""The score modifiers besides scale and bias; the names are attributes of `Call`."""
LOW_SOFTCAP = 50.0
"""The largest softcap for which the softmax needs no maximum: ``exp`` of scores within ``+-softcap``, summed over a
million keys, stays a factor of 2**35 away from overflow and underflow in fp32 and bf16."""

_TEXT = re.compile(
    r"([^/]+)/scale=([^/]+?)(?:/softcap=([^/]+?))?(?:/bias=(\d+)(\+gradient)?)?(?:/dropout=([^/]+))?"
    r"(?:/grad_logsumexp=(\d+))?(?:/sinks=(\d+))?(/logsumexp)?(?:/orders=([0-3,]+))?"
)


@dataclass(frozen=True)
class Bias:
    """An attention bias: ``bias[b, h, i, j]`` is added to the scaled score of query i of head h and key j.

    Args:
        operand: a float tensor [batch, heads, q_len, kv_len], any strides, any values; it has size 1 along dimensions
            that do not matter.
        gradient: whether the graph needs its gradient.
    """

    operand: Operand
    gradient: bool = False

    def __str__(self) -> str:
        return f"{self.operand.index}" + ("+gradient" if self.gradient else "")


@dataclass(frozen=True)
class Call:
    """Specification of an attention operator: everything that determines its result, apart from its tensors.

    ``str`` gives for example ``causal & keys(0)/scale=0.125/dropout=0.1,1/orders=0213,0213,0213``; `parse` is its
    inverse.  Graph dumps and generated code show this text.

    Args:
        mask: which query sees which key.
        scale: the factor of the scores.
        orders: the layouts of the results: of the output in a forward, of dq, dk and dv in a backward.  Empty before
            the layouts are chosen.
        bias: the bias that is added to the scores; None without one.
        dropout: the dropout of probabilities; None without dropout.
        grad_logsumexp: in a backward, the gradient of the log-sum-exp, fp32 [batch, heads, q_len], or one value per
            token if the mask is varlen (see `Placed`); finite, any strides.  None without one.
        softcap: bounds the scaled scores s, which become ``softcap * tanh(s / softcap)`` before a bias is added; None
            without one.
        sinks: in a forward, attention sinks, further scores that take part in the softmax but have no value: fp32
            [batch, heads, q_len], any strides, of size 1 along dimensions that do not matter.  None without any.
        logsumexp: in a forward, whether the program reads the log-sum-exp, which is then that of fp32 probabilities.
            If only our backward reads it, it may be that of the probabilities rounded to the dtype in which they are
            multiplied by the values.
    """

    mask: Mask
    scale: float
    orders: tuple[Order, ...] = ()
    bias: Bias | None = None
    dropout: Dropout | None = None
    softcap: float | None = None
    grad_logsumexp: Operand | None = None
    sinks: Operand | None = None
    logsumexp: bool = False

    def __post_init__(self) -> None:
        if self.softcap is not None and not 0.0 < self.softcap < math.inf:
            raise ArgumentError("softcap", self.softcap, "None or a finite number above 0")
        for order in self.orders:
            if sorted(order) != list(range(4)):
                raise ArgumentError("orders", self.orders, "permutations of 0, 1, 2, 3")

    def __hash__(self) -> int:  # launches look calls and plans up in caches
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        scores = self.scale, self.softcap, self.bias, self.dropout, self.sinks
        return hash((self.mask, scores, self.orders, self.grad_logsumexp, self.logsumexp))

    @functools.cached_property  # every call asks
    def operands(self) -> tuple[Operand, ...]:
        """The tensors that the call reads besides query, key and value, in the order mask, bias, dropout seed, gradient
        of the log-sum-exp, sinks.
        """
        bias = () if self.bias is None else (self.bias.operand,)
        seed = () if self.dropout is None else (self.dropout.seed,)
        gradient = () if self.grad_logsumexp is None else (self.grad_logsumexp,)
        sinks = () if self.sinks is None else (self.sinks,)
        return (*self.mask.operands, *bias, *seed, *gradient, *sinks)

    @functools.cached_property
    def of_forward(self) -> Call:
        """This call without the operands that only a backward reads."""
        return self if self.grad_logsumexp is None else replace(self, grad_logsumexp=None)

    @functools.cached_property
    def of_backward(self) -> Call:
        """This call without sinks and `logsumexp`, which only a forward reads.

        The output and the log-sum-exp contain all that a backward needs of sinks.
        """
        plain = self.sinks is None and not self.logsumexp
        return self if plain else replace(self, sinks=None, logsumexp=False)

    @property
    def modifiers(self) -> dict[str, float]:
        """The modifiers in use and their values, by their names in `MODIFIERS`."""
        values = zip(MODIFIERS, (self.softcap,), strict=True)
        return {name: value for name, value in values if value is not None}

    @functools.cached_property  # every call asks
    def traits(self) -> Traits:
        """The properties for which kernels are specialized."""
        band, mask = self.mask.band, self.mask
        terms = tuple(sorted(mask.terms))
        numbers = any(term.OPTIONAL and term.has_key_numbers for term in mask.others)
        return Traits(
            band.lo is not None, band.hi is not None, terms, self.bias is not None, self.dropout is not None,
            mask.placed is not None, numbers, tuple(self.modifiers), self.grad_logsumexp is not None,
            self.sinks is not None, self.softcap is not None and self.softcap <= LOW_SOFTCAP,
            self.logsumexp,
        )  # fmt: skip

    def __str__(self) -> str:
        orders = ",".join("".join(map(str, order)) for order in self.orders)
        bias = "" if self.bias is None else f"/bias={self.bias}"
        dropout = "" if self.dropout is None else f"/dropout={self.dropout}"
        softcap = "" if self.softcap is None else f"/softcap={self.softcap!r}"
        gradient = "" if self.grad_logsumexp is None else f"/grad_logsumexp={self.grad_logsumexp.index}"
        sinks = "" if self.sinks is None else f"/sinks={self.sinks.index}"
        logsumexp = "/logsumexp" if self.logsumexp else ""
        return f"{self.mask}/scale={self.scale!r}{softcap}{bias}{dropout}{gradient}{sinks}{logsumexp}" + (
            f"/orders={orders}" if orders else ""
        )

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Call:
        """Parse the result of ``str(call)``.

        Raises:
            ArgumentError: the text was not made by ``str(Call)``.
        """
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ArgumentError("call", text, "a string made by str(Call)")
        try:
            scale, softcap = float(match[2]), None if match[3] is None else float(match[3])
        except ValueError as error:
            raise ArgumentError("call", text, "a string made by str(Call)") from error
        bias = Bias(Operand(int(match[4])), match[5] is not None) if match[4] else None
        dropout = Dropout.parse(match[6]) if match[6] else None
        gradient, sinks = (Operand(int(index)) if index else None for index in (match[7], match[8]))
        orders = tuple(tuple(map(int, order)) for order in match[10].split(",")) if match[10] else ()
        logsumexp = match[9] is not None
        return Call(Mask.parse(match[1]), scale, orders, bias, dropout, softcap, gradient, sinks, logsumexp)
