"""`Dropout`: the dropout of attention probabilities."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar

from ..errors import ArgumentError
from .components import Operand

STEPS = 1 << 16
"""Number of equally likely values of 16 random bits, of which `Dropout.threshold` drop a probability."""

_BETWEEN_ZEROS = 0x7F81
"""A threshold that comparing bfloat16 numbers cannot realise: exactly this many bit patterns sort below the positive
zero, one of them the negative zero, which compares equal to it."""

ROUNDS = 7
"""Rounds of Philox4x32 that make random bits, see Note [Random bits of dropout] in `kernels/reference/dropout.py`."""


@dataclass(frozen=True)
class Dropout:
    """Dropout: each probability is dropped independently with probability `p`; the others are multiplied by `rescale`.

    ``str`` gives for example ``0.1,2``; `parse` is its inverse.

    Args:
        p: greater than 0 and less than 1.
        seed: an int64 tensor [1] that determines the random bits of all probabilities (`kernels/reference/dropout.py`).
    """

    p: float
    seed: Operand

    TEXT: ClassVar[str] = "[^/]+"
    """A regular expression for ``str(dropout)``."""

    def __post_init__(self) -> None:
        if not 0 < self.p < 1:
            raise ArgumentError("p", self.p, "a number greater than 0 and less than 1")

    @property
    def operand(self) -> Operand:
        """The reference to the tensor of the seed."""
        return self.seed

    @property
    def threshold(self) -> int:
        """How many of `STEPS` equally likely random values drop a probability: ``p * 2**16``, rounded, less than 2**16.

        Two values, for p near 0.498 and 0.502, are never used, see Note [Comparing random bits]; the adjacent value
        away from one half is used instead.
        """
        count = min(math.floor(self.p * STEPS + 0.5), STEPS - 1)
        return count - (count == _BETWEEN_ZEROS) + (count == STEPS - _BETWEEN_ZEROS)

    @property
    def rescale(self) -> float:
        """The factor of kept probabilities: the inverse of the exact probability of being kept."""
        return STEPS / (STEPS - self.threshold)

    def __str__(self) -> str:
        return f"{self.p!r},{self.seed}"

    @staticmethod
    def parse(text: str) -> Dropout:
        """Parse the result of ``str(dropout)``.

        Raises:
            ArgumentError: the text was not made by ``str(Dropout)``.
        """
        match = re.fullmatch(r"([0-9.e-]+),(\d+)", text)
        try:
            if match is not None:
                return Dropout(float(match[1]), Operand(int(match[2])))
        except ValueError:
            pass
        raise ArgumentError("dropout", text, "'<p>,<operand>'")
