"""`Traits`: the specialization key of kernels, the properties of a call for which they are compiled."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .components import COMPONENTS, Component
from .mask import Band
from .operands import OPERANDS


@dataclass(frozen=True)
class Traits:
    """The properties of a call for which kernels are compiled; lengths, scale and bounds are run-time arguments.

    ``str`` gives for example ``full``, ``lo_keys`` or ``lo_hi_bias_dropout``, a part of kernel names that distinguishes
    the kernels of different calls.

    Attributes:
        has_lo, has_hi: the band of the mask has this bound.
        components: the names of the mask's components besides the band, sorted, see `model.components.COMPONENTS`.
        operands: the names of the optional operands, in the order of `model.operands.OPERANDS`.
        varlen: the mask is defined on rows of packed tokens, see `model.VarlenLayout`.
        numbers: a component that can use the positions of the keys, such as an interval, reads a tensor of numbers
            instead.
        modifiers: the names of the score modifiers besides scale and bias, see `AttentionSpec.modifiers`.
        low_scores: a bound keeps scores so close to zero that the softmax needs no maximum, see
            `model.attention_spec.LOW_SOFTCAP`.
        logsumexp: in a forward, the program reads the log-sum-exp.
    """

    has_lo: bool = False
    has_hi: bool = False
    components: tuple[str, ...] = ()
    operands: tuple[str, ...] = ()
    varlen: bool = False
    numbers: bool = False
    modifiers: tuple[str, ...] = ()
    low_scores: bool = False
    logsumexp: bool = False

    def has(self, component: str) -> bool:
        """Return whether the mask has a component of this name."""
        return component in self.components

    def reads(self, operand: str) -> bool:
        """Return whether the call has the optional operand of this name."""
        return operand in self.operands

    @property
    def biased(self) -> bool:
        """Whether something is added to the score of each pair of query and key, such as a bias."""
        return bool(self._that_change("scores"))

    def _that_change(self, *what: str) -> list[str]:
        """Return the names of the optional operands that change this, see `OperandKind.changes`."""
        return [name for name in self.operands if OPERANDS[name].changes in what]

    @property
    def kinds(self) -> tuple[type[Component], ...]:
        """The classes of the mask's components besides the band, in the order of `COMPONENTS`."""
        return tuple(kind for name, kind in COMPONENTS.items() if name in self.components)

    @property
    def of_pairs(self) -> bool:
        """Whether a component reads a tensor with an element per pair, as a dense mask does."""
        return any(kind.RELATION.pairs for kind in self.kinds)

    @property
    def by_head(self) -> bool:
        """Whether a component reads numbers of a query that differ between heads."""
        return any(kind.BY_HEAD for kind in self.kinds)

    @property
    def bounds(self) -> tuple[bool, bool]:
        """Whether the band of the mask has a lower and an upper bound: (`has_lo`, `has_hi`)."""
        return self.has_lo, self.has_hi

    @property
    def band(self) -> Band:
        """A band that has a lower and an upper bound exactly where the mask's band has one.

        The values of the bounds (0) do not matter, because kernels take them as arguments.
        """
        return Band(0 if self.has_lo else None, 0 if self.has_hi else None)

    @functools.cached_property  # every call asks
    def data(self) -> frozenset[str]:
        """The names of the mask's `components`, and of the operands that change scores or probabilities."""
        return frozenset((*self.components, *self._that_change("scores", "probabilities")))

    @functools.cached_property  # every call asks
    def asks(self) -> frozenset[str]:
        """The names in `data` and `modifiers`: all that affects probabilities besides the band, the scale and sinks."""
        return self.data.union(self.modifiers)

    @functools.cached_property  # every call asks
    def scores(self) -> frozenset[str]:
        """The names of the operands and `modifiers` that change scores or probabilities."""
        return frozenset((*self._that_change("scores", "probabilities"), *self.modifiers))

    def __str__(self) -> str:
        bounds = [name for name, has in (("lo", self.has_lo), ("hi", self.has_hi)) if has]
        others = {"varlen": self.varlen, "numbers": self.numbers} | dict.fromkeys(self.modifiers, True)
        others |= {"low": self.low_scores} | dict.fromkeys(self._that_change("rows"), True)
        others |= {"logsumexp": self.logsumexp}
        return "_".join([*(bounds or ["full"]), *sorted(self.data), *(name for name, has in others.items() if has)])
