"""`Dropout`: the part of a call that drops probabilities at random."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ..errors import ArgumentError
from .terms import Operand

STEPS = 1 << 16
"""As many sets of 16 random bits are equally probable; a threshold says how many of them drop a probability."""

_BETWEEN_ZEROS = 0x7F81
"""No bfloat16 number has so many below it: as many, and the negative zero, are less than the positive one."""

ROUNDS = 7
"""Rounds of Philox4x32 that make random bits, see Note [Random bits of dropout] in `kernels/reference/dropout.py`."""


@dataclass(frozen=True)
class Dropout:
    """Every probability is dropped with probability `p`, independently, and what is kept is multiplied.

    ``str`` gives for example ``0.1,2``; `parse` reads it back.

    Args:
        p: greater than 0 and less than 1.
        seed: an int64 tensor [1], from which every probability's random bits follow (`kernels/reference/dropout.py`).
    """

    p: float
    seed: Operand

    def __post_init__(self) -> None:
        if not 0 < self.p < 1:
            raise ArgumentError("p", self.p, "a number greater than 0 and less than 1")

    @property
    def threshold(self) -> int:
        """How many of `STEPS` equally probable numbers drop: `p`, rounded to a multiple of 2**-16 that is below 1.

        Two multiples near 0.498 and 0.502 do not occur, see Note [Comparing random bits]; their neighbours away from a
        half take their place.
        """
        count = min(math.floor(self.p * STEPS + 0.5), STEPS - 1)
        return count - (count == _BETWEEN_ZEROS) + (count == STEPS - _BETWEEN_ZEROS)

    @property
    def rescale(self) -> float:
        """The factor of kept probabilities: the inverse of the exact probability to be kept."""
        return STEPS / (STEPS - self.threshold)

    def __str__(self) -> str:
        return f"{self.p!r},{self.seed.index}"

    @staticmethod
    def parse(text: str) -> Dropout:
        """Inverse of ``str``.

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
