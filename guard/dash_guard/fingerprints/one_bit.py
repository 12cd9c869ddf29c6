"""Finds out from two hashes of a tensor whether a single bit of it has changed in between, as in memory that fails.

The lanes of a hash are sums over words (Note [Fingerprints] in `hashing`), so one changed word shifts both sums by what
it adds now less what it has added. A bit of one half of a word changes ``half + key`` by a power of two, or by that
less 2^32 where the sum wraps around. The other factor of the product is therefore a quotient of the shift. Few
quotients are whole numbers, and only words that have one of these as a factor are looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import hashing

_HALF, _WORD = 1 << 32, 1 << 64
_MOST = 1 << 12  # words that are looked at


def has_flipped(now: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> bool | None:
    """Whether a tensor differs in a single bit from what it was before; waits for its device.

    Args:
        now: the bytes of the tensor, uint8 [n].
        before, after: its lanes before and after the change, as signed 64-bit numbers.

    Returns:
        None if the tensor does not have the lanes `after`, because it has changed again.
    """
    if tuple(hashing.lanes_of(now).tolist()) != after:
        return None
    shifts = [(a - b) % _WORD for a, b in zip(before, after, strict=True)]
    factors = torch.tensor(sorted(_quotients(shifts[0])), dtype=torch.int64, device=now.device)
    looked = 0
    for first, words, low, high in hashing.factors(now):
        for place in (torch.isin(low, factors) | torch.isin(high, factors)).nonzero().flatten().tolist():
            looked += 1
            if looked > _MOST:
                return False
            if _fits(first + place, int(words[place]) % _WORD, shifts):
                return True
    return False


def _quotients(shift: int) -> set[int]:
    """The factors below 2^32 of which some multiple by a change of one bit is `shift` modulo 2^64."""
    found = set()
    for bit in range(32):
        for change in (1 << bit, (1 << bit) - _HALF):
            for whole in (shift, shift - _WORD):
                for signed in (change, -change):
                    if whole % signed == 0 and 0 <= whole // signed < _HALF:
                        found.add(whole // signed)
    return found


def _fits(place: int, word: int, shifts: list[int]) -> bool:
    """Whether some bit of a word was different before, so that the lanes have shifted by `shifts`."""
    now = hashing.summands(word, place)
    return any(
        [(was - is_) % _WORD for was, is_ in zip(hashing.summands(word ^ 1 << bit, place), now, strict=True)] == shifts
        for bit in range(64)
    )
