"""`Traits`: the facts about a call for which kernels are compiled, and nothing else about it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .mask import Band
from .terms import TERMS, Term


@dataclass(frozen=True)
class Traits:
    """The facts about a call for which kernels are compiled; lengths, scale and bounds are arguments.

    ``str`` gives for example ``full``, ``lo_keys`` or ``lo_hi_bias_dropout``: the part of kernels' names that tells the
    text of one call's kernels from those of other calls.

    Attributes:
        has_lo, has_hi: the band of the mask has this bound.
        terms: the names of the mask's other terms, sorted, see `model.terms.TERMS`.
        bias: a bias is added to the scores.
        dropout: probabilities are dropped at random.
        placed: the mask is one of rows, see `model.Placed`.
        numbers: a term that may be of the positions of the keys, as an interval, is of other numbers of theirs.
        modifiers: the names of what changes scores beside scale and bias, see `Call.modifiers`.
        grad_logsumexp: the log-sum-exp has a gradient, in a backward.
        sinks: there are scores of no key, in a forward.
        low_scores: a bound keeps scores so near zero that a softmax needs no maximum, see `model.call.LOW_SOFTCAP`.
        logsumexp: the program reads the log-sum-exp, in a forward.
    """

    has_lo: bool = False
    has_hi: bool = False
    terms: tuple[str, ...] = ()
    bias: bool = False
    dropout: bool = False
    placed: bool = False
    numbers: bool = False
    modifiers: tuple[str, ...] = ()
    grad_logsumexp: bool = False
    sinks: bool = False
    low_scores: bool = False
    logsumexp: bool = False

    def has(self, term: str) -> bool:
        """Whether the mask has a term of this name."""
        return term in self.terms

    @property
    def kinds(self) -> tuple[type[Term], ...]:
        """The kinds of the mask's other terms, in the order of `TERMS`."""
        return tuple(kind for name, kind in TERMS.items() if name in self.terms)

    @property
    def of_pairs(self) -> bool:
        """Whether a term has operands of pairs, as a dense mask."""
        return any(kind.RELATION.pairs for kind in self.kinds)

    @property
    def bounds(self) -> tuple[bool, bool]:
        """`has_lo` and `has_hi`."""
        return self.has_lo, self.has_hi

    @property
    def band(self) -> Band:
        """Any band with these bounds: their values are arguments of kernels."""
        return Band(0 if self.has_lo else None, 0 if self.has_hi else None)

    @functools.cached_property  # every call asks
    def data(self) -> frozenset[str]:
        """The kinds of data that the call reads beside query, key and value: `terms`, "bias" and "dropout"."""
        return frozenset((*self.terms, *(["bias"] if self.bias else []), *(["dropout"] if self.dropout else [])))

    @functools.cached_property  # every call asks
    def asks(self) -> frozenset[str]:
        """The kinds of `data`, and the `modifiers`: all that the call has beside a band."""
        return self.data.union(self.modifiers)

    @functools.cached_property  # every call asks
    def scores(self) -> frozenset[str]:
        """The names of all that changes scores and probabilities: "bias", "dropout" and the `modifiers`."""
        all_ = {"bias": self.bias, "dropout": self.dropout}
        return frozenset(name for name, does in all_.items() if does).union(self.modifiers)

    def __str__(self) -> str:
        bounds = [name for name, has in (("lo", self.has_lo), ("hi", self.has_hi)) if has]
        others = {"placed": self.placed, "numbers": self.numbers} | dict.fromkeys(self.modifiers, True)
        others |= {"low": self.low_scores, "grad_logsumexp": self.grad_logsumexp, "sinks": self.sinks}
        others |= {"logsumexp": self.logsumexp}
        return "_".join([*(bounds or ["full"]), *sorted(self.data), *(name for name, has in others.items() if has)])
