"""States of random number generators as texts, and how far two of them are apart; imports no torch."""

from __future__ import annotations

import base64
import binascii
import random
import re
import struct
from collections.abc import Sequence

_WORDS = struct.Struct("<624I")
_MT19937 = re.compile(r"mt19937 ([0-9]{1,3}) ([A-Za-z0-9+/=]+)")
_PHILOX = re.compile(r"philox ([0-9]{1,20}) ([0-9]{1,20})")
_SHOWN = 8  # numbers by which a place in a sequence is known
_REACHES = (1 << 12, 1 << 22)
"""So many numbers of a sequence are searched for the state of another generator: few at first."""
_DRAW = 4
"""What the smallest draw adds to the offset of a GPU's generator."""


def mt19937(words: Sequence[int], index: int) -> str:
    """The state of a Mersenne Twister: PyTorch's on the CPU, and those of `random` and NumPy.

    Args:
        words: 624 words of 32 bits.
        index: that of the next word, from 0 to 624.
    """
    return f"mt19937 {index} {base64.b64encode(_WORDS.pack(*words)).decode()}"


def philox(seed: int, offset: int) -> str:
    """The state of a GPU's generator."""
    return f"philox {seed} {offset}"


def difference(a: str, b: str) -> str:
    """How the state b of a generator differs from its state a, as the rest of a sentence.

    A draw is a number of 32 bits on the CPU, and an offset of 4 on a GPU: at most 4 numbers for each thread.
    """
    if (of_a := _PHILOX.fullmatch(a)) and (of_b := _PHILOX.fullmatch(b)):
        if of_a[1] != of_b[1]:
            return f"has the seed {of_b[1]} instead of {of_a[1]}"
        return _apart(_rounded(int(of_b[2]) - int(of_a[2])))
    first, second = _twister(a), _twister(b)
    if first is None or second is None:
        return "has another state than in a"
    for reach in _REACHES:
        for direction, one, other in ((1, first, second), (-1, second, first)):
            if (distance := _distance(one, other, reach)) is not None:
                return _apart(direction * distance)
    return f"has another seed than in a, or is more than {_REACHES[-1]} draws away"


def _rounded(offset: int) -> int:
    draws = -(-abs(offset) // _DRAW)
    return draws if offset > 0 else -draws


def _apart(draws: int) -> str:
    if not draws:  # only what a generator keeps for the next normal number
        return "keeps another normal number than in a"
    count = "one draw" if abs(draws) == 1 else f"{abs(draws)} draws"
    return f"is {count} {'later' if draws > 0 else 'earlier'} than in a"


def _twister(text: str) -> random.Random | None:
    found = _MT19937.fullmatch(text)
    if not found:
        return None
    try:
        words = _WORDS.unpack(base64.b64decode(found[2], validate=True))
        twister = random.Random()
        twister.setstate((3, (*words, int(found[1])), None))
    except (binascii.Error, struct.error, ValueError):  # of a damaged file
        return None
    return twister


def _distance(one: random.Random, other: random.Random, reach: int) -> int | None:
    """After how many numbers of 32 bits one generator is where the other is; None if they are too many."""
    shown, sequence = _numbers(other, _SHOWN), _numbers(one, reach + _SHOWN)
    place = sequence.find(shown)
    while place % 4 and place >= 0:
        place = sequence.find(shown, place + 1)
    return None if place < 0 else place // 4


def _numbers(twister: random.Random, count: int) -> bytes:
    """The next numbers of a generator, which stays where it is."""
    state = twister.getstate()
    drawn = twister.getrandbits(32 * count).to_bytes(4 * count, "little")
    twister.setstate(state)
    return drawn
