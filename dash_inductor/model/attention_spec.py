"""`AttentionSpec`, the specification of one attention, and its text form, an argument of the operators in the graph."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ArgumentError
from .components import Operand
from .dropout import Dropout
from .mask import Mask
from .operands import OPERANDS, Bias, Part
from .traits import Traits

Order = tuple[int, ...]
"""The dimensions of a tensor, from the largest stride to the smallest."""

MODIFIERS = ("softcap",)
"""The score modifiers besides scale and bias; the names are attributes of `AttentionSpec`."""
LOW_SOFTCAP = 50.0
"""The largest softcap for which the softmax needs no maximum: ``exp`` of scores within ``+-softcap``, summed over a
million keys, stays a factor of 2**35 away from overflow and underflow in fp32 and bf16."""

_TEXT = re.compile(
    r"(?P<mask>[^/]+)/scale=(?P<scale>[^/]+?)(?:/softcap=(?P<softcap>[^/]+?))?"
    + "".join(f"(?:/{name}=(?P<{name}>{kind.part.TEXT}))?" for name, kind in OPERANDS.items())
    + "(?P<logsumexp>/logsumexp)?(?P<delta>/delta)?(?:/orders=(?P<orders>[0-3,]+))?"
)


@dataclass(frozen=True)
class AttentionSpec:
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
            token if the mask is varlen (see `VarlenLayout`); finite, any strides.  None without one.
        softcap: bounds the scaled scores s, which become ``softcap * tanh(s / softcap)`` before a bias is added; None
            without one.
        sinks: in a forward, attention sinks, further scores that take part in the softmax but have no value: fp32
            [batch, heads, q_len], any strides, of size 1 along dimensions that do not matter.  None without any.
        logsumexp: in a forward, whether the program reads the log-sum-exp, which is then that of fp32 probabilities.
            If only our backward reads it, it may be that of the probabilities rounded to the dtype in which they are
            multiplied by the values.
        delta: in a backward, whether the program reads delta, see `results`.
        slopes: ALiBi slopes, fp32 [batch, heads], any strides, of size 1 along dimensions that do not matter:
            ``-slope * |i + kv_len - q_len - j|`` is added to the score of query i and key j.  None without any.
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
    delta: bool = False
    slopes: Operand | None = None

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
        parts = tuple(self.given.items())
        return hash((self.mask, self.scale, self.softcap, parts, self.orders, self.logsumexp, self.delta))

    @functools.cached_property
    def given(self) -> dict[str, Part]:
        """The optional operands that the attention has, by name, in the order of `OPERANDS`."""
        parts = {name: getattr(self, name) for name in OPERANDS}
        return {name: part for name, part in parts.items() if part is not None}

    @functools.cached_property  # every call asks
    def operands(self) -> tuple[Operand, ...]:
        """The tensors that the attention reads besides query, key and value: the mask's, then those of `given`."""
        return (*self.mask.operands, *(part.operand for part in self.given.values()))

    @functools.cached_property
    def of_forward(self) -> AttentionSpec:
        """The spec of the forward: this spec with `delta` off, and without the operands that only a backward reads."""
        found = self._without("backward")
        return replace(found, delta=False) if found.delta else found

    @functools.cached_property
    def of_backward(self) -> AttentionSpec:
        """The spec of the backward: this spec with `logsumexp` off, and without operands that only a forward reads.

        These are operands such as sinks: the output and the log-sum-exp contain all that a backward needs of them.
        """
        found = self._without("forward")
        return replace(found, logsumexp=False) if found.logsumexp else found

    @functools.cached_property  # every call asks
    def results(self) -> tuple[str, ...]:
        """The results of a backward in their order: "dq", "dk" and "dv", then "dbias" and "delta" if wanted.

        Delta is fp32 [batch, heads, q_len], the sum of grad_out * out over the last dimension minus the gradient of
        the log-sum-exp, which every backward computes first.
        """
        has_dbias = self.bias is not None and self.bias.gradient
        return ("dq", "dk", "dv", *(["dbias"] if has_dbias else []), *(["delta"] if self.delta else []))

    def _without(self, side: str) -> AttentionSpec:
        """This spec without the operands that only this side reads."""
        dropped: dict[str, Any] = {name: None for name in self.given if OPERANDS[name].side == side}
        return replace(self, **dropped) if dropped else self

    @property
    def modifiers(self) -> dict[str, float]:
        """The score modifiers that the call uses, such as softcap, and their values, by their names in `MODIFIERS`."""
        values = zip(MODIFIERS, (self.softcap,), strict=True)
        return {name: value for name, value in values if value is not None}

    @functools.cached_property  # every call asks
    def traits(self) -> Traits:
        """The compile-time properties of the attention: kernels are compiled for each combination of them."""
        band, mask = self.mask.band, self.mask
        components = tuple(sorted(mask.components))
        numbers = any(component.OPTIONAL and component.has_key_numbers for component in mask.others)
        return Traits(
            band.lo is not None, band.hi is not None, components, tuple(self.given), mask.varlen_layout is not None,
            numbers,
            tuple(self.modifiers), self.softcap is not None and self.softcap <= LOW_SOFTCAP, self.logsumexp,
        )  # fmt: skip

    def __str__(self) -> str:
        orders = ",".join("".join(map(str, order)) for order in self.orders)
        softcap = "" if self.softcap is None else f"/softcap={self.softcap!r}"
        parts = "".join(f"/{name}={part}" for name, part in self.given.items())
        read = "".join(f"/{name}" for name in ("logsumexp", "delta") if getattr(self, name))
        return f"{self.mask}/scale={self.scale!r}{softcap}{parts}{read}" + (f"/orders={orders}" if orders else "")

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> AttentionSpec:
        """Parse the text of an attention spec, as ``str`` gives it.

        Raises:
            ArgumentError: the text was not made by ``str`` of an `AttentionSpec`.
        """
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ArgumentError("spec", text, "a string made by str(AttentionSpec)")
        try:
            scale, softcap = (None if match[name] is None else float(match[name]) for name in ("scale", "softcap"))
        except ValueError as error:
            raise ArgumentError("spec", text, "a string made by str(AttentionSpec)") from error
        assert scale is not None
        others: dict[str, Any] = {name: match[name] is not None for name in ("logsumexp", "delta")}
        others |= {name: kind.part.parse(match[name]) for name, kind in OPERANDS.items() if match[name]}
        orders = tuple(tuple(map(int, order)) for order in match["orders"].split(",")) if match["orders"] else ()
        return AttentionSpec(Mask.parse(match["mask"]), scale, orders, softcap=softcap, **others)
