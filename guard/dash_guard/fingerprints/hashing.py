"""The hash of fingerprints: two 64-bit lanes, sums over the bytes of a tensor that are exact in any order of additions.

Note [Fingerprints]
A tensor's bytes, in the order of its elements' indices, are words of 8 bytes, the last one filled up with zeros.  Word
`i` has the halves `low` and `high` of 32 bits.  Lane `l` of the hash is

    sum over i of  ((low_i + k) mod 2^32) * ((high_i + K) mod 2^32)   mod 2^64

where `k` and `K` are the halves of a key of 64 bits: the `i`-th number of the generator splitmix64 with the lane's
seed.  This is NH, the hash of UMAC (Black, Halevi, Krawczyk, Krovetz and Rogaway, CRYPTO 1999; RFC 4418).

* Sums modulo 2^64 are exact, so that any number of threads may add in any order: the hash is deterministic, and so is
  one that a GPU adds up with atomic operations.
* Every word has keys of its own, so that the hash knows positions: moving or swapping values changes it.
* Collisions: take two different tensors of the same dtype and shape, chosen without regard to the keys, and let word
  `i` be one in which they differ.  Let `low` be the half that differs, and let all other words and the key `k` be
  given.  If the halves `high` agree, the lanes are equal only if ``d * ((high_i + K) mod 2^32) = c  (mod 2^64)`` with a
  given `c` and a difference `d` of two different numbers below 2^32.  The difference of two solutions would be below
  2^32 too, so that its product with `d` is not 0 modulo 2^64: at most one of the 2^32 values of `K` is a solution.  If
  the halves `high` differ too, this still holds (Theorem 4.2 of the paper, which also covers the case that only `high`
  differs).  So a lane is equal with a probability of at most 2^-32, and both lanes, whose keys are independent, with
  one of at most 2^-64.  That is the worst case; for values that look random it is 2^-128.  A run of a million steps
  with a thousand tensors makes 10^9 comparisons: the chance that any of them misses a difference is below 10^-10.
* The bound supposes random keys.  Those of splitmix64 are fixed, so that fingerprints of two runs can be compared; they
  pass the usual tests of randomness, and no training run chooses its values with a view to them.

Dtype and shape are no part of the lanes.  `fingerprint.digest` hashes them with the lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .sizes import LANES

SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)  # the first digits of pi
STEP = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of splitmix64: the addend of every number, and the two factors that mix."""

WORD = 8
"""Bytes of a word."""

_CHUNK = 1 << 16  # words that are hashed at a time: the intermediate results stay in a cache
_LOW = 0xFFFFFFFF


def lanes_of(bytes_: Tensor, first: int = 0) -> Tensor:
    """Computes the two 64-bit lanes of the hash with PyTorch operations, on any device.

    Lanes are additive: the lanes of a tensor's parts, each with its `first`, sum to the lanes of the tensor, modulo
    2^64.

    Args:
        bytes_: uint8 [n].
        first: the number of 8-byte words before these bytes.

    Returns:
        int64 [2]; their bits are unsigned 64-bit numbers.
    """
    total = torch.zeros(LANES, dtype=torch.int64, device=bytes_.device)
    for start in range(0, bytes_.numel(), _CHUNK * WORD):
        chunk = bytes_[start : start + _CHUNK * WORD]
        total += _lanes_of_words(_words(chunk), first + start // WORD)
    return total


def lanes_of_many(parts: Sequence[Tensor], firsts: Sequence[int]) -> Tensor:
    """Computes the two 64-bit lanes of the hash for many small tensors on the CPU, with few PyTorch operations.

    Args:
        parts: the bytes of each tensor, uint8 [n].
        firsts: the number of 8-byte words before each part.

    Returns:
        int64 [parts, 2].
    """
    sizes = tuple(-(-part.numel() // WORD) for part in parts)
    words = torch.cat([_words(part) for part in parts])
    ends = torch.tensor((0, *sizes)).cumsum(0)
    low, high = words & _LOW, (words >> 32) & _LOW
    lanes = []
    for low_key, high_key in _keys(sizes, tuple(firsts)):
        sums = torch.nn.functional.pad((((low + low_key) & _LOW) * ((high + high_key) & _LOW)).cumsum(0), (1, 0))[ends]
        lanes.append(sums.diff())
    return torch.stack(lanes, 1)


def factors(bytes_: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yields the words of a tensor and, for the first lane, the two factors of what each word adds to it, in parts.

    Args:
        bytes_: uint8 [n].

    Returns:
        (number of the first word, words, low factors, high factors), each int64 [words].
    """
    for start in range(0, bytes_.numel(), _CHUNK * WORD):
        words = _words(bytes_[start : start + _CHUNK * WORD])
        first = start // WORD
        key = _splitmix(torch.arange(first + 1, first + 1 + words.numel(), device=words.device), SEEDS[0])
        yield first, words, ((words & _LOW) + key) & _LOW, ((words >> 32) + (key >> 32)) & _LOW


def summands(word: int, place: int) -> list[int]:
    """What a word, an unsigned number, adds to each lane; `place` is its number from 0."""
    keys = [int(_splitmix(torch.tensor([place + 1]), seed)) for seed in SEEDS]
    return [((word + key) & _LOW) * (((word >> 32) + (key >> 32)) & _LOW) for key in keys]


@functools.lru_cache(maxsize=16)
def _keys(sizes: tuple[int, ...], firsts: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """The halves of the keys of every word of tensors of these sizes in words, for each lane."""
    places = torch.cat([torch.arange(first + 1, first + 1 + size) for size, first in zip(sizes, firsts, strict=True)])
    keys = [_splitmix(places, seed) for seed in SEEDS]
    return [(key & _LOW, (key >> 32) & _LOW) for key in keys]


def _words(chunk: Tensor) -> Tensor:
    missing = -chunk.numel() % WORD
    if missing or chunk.storage_offset() % WORD or chunk.data_ptr() % WORD:
        padded = chunk.new_zeros(chunk.numel() + missing)
        padded[: chunk.numel()] = chunk
        chunk = padded
    return chunk.view(torch.int64)


def _lanes_of_words(words: Tensor, first: int) -> Tensor:
    places = torch.arange(first + 1, first + 1 + words.numel(), device=words.device)
    low, high = words & _LOW, (words >> 32) & _LOW
    lanes = []
    for seed in SEEDS:
        key = _splitmix(places, seed)
        lanes.append((((low + key) & _LOW) * ((high + (key >> 32)) & _LOW)).sum())
    return torch.stack(lanes)


def _splitmix(places: Tensor, seed: int) -> Tensor:
    z = places * _signed(STEP) + _signed(seed)
    z = (z ^ _shifted(z, 30)) * _signed(FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """``z >> bits`` of the unsigned number with the bits of `z`."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
