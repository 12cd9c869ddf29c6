"""The probabilities that dropout keeps, in plain ATen: the definition of what `dropout` computes on a GPU.

Note [Random bits of dropout]
    Query i and key j of query head h of batch element b have 16 bits of one block of Philox4x32-7 (Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3", SC 2011).  Its key is the call's seed, low word first.  Its counter
    is (i without bit 3, j without bits 0 and 3, h, b), where the bits above a missing one move down.  Bit 3 of i and
    bit 3 of j choose one of the four words (2 * bit of i + bit of j), and bit 0 of j its lower or upper half.

    Note [Comparing random bits] says which bits drop a probability.

    So the bits of a pair follow from the seed, b, h, i and j alone: neither tiles nor tile schedules, neither lengths
    nor other heads and batch elements, nor the kernel have an influence.  Two pairs never share bits, and two blocks of
    one seed never have the same counter.

    Seven rounds are the fewest with which Philox4x32 passes all of TestU01's batteries, BigCrush among them; the ten
    that its authors recommend are a margin.  Rounds are what dropout costs: a block of seven has two thirds of the
    multiplications of one of ten, since the first ones work on words that whole rows and columns share.

    A block serves 2 x 4 pairs that lie as the fragments of matmuls do: a thread of a tensor core holds rows r and
    r + 8, and columns 2c, 2c + 1, 2c + 8, 2c + 9 of an accumulator.  Of a tile whose rows are queries, a thread thus
    computes the bits of its own elements and of no others; of a transposed tile it shares a block with one neighbour.

Note [Comparing random bits]
    The 16 bits of a pair are compared with a bound as bfloat16 numbers, since Hopper compares two of these with one
    instruction, and has no such instruction for 16-bit integers.  The bound is chosen so that exactly
    `Dropout.threshold` of the 2**16 bit patterns are below it, counted from minus infinity up to minus zero and then
    from plus zero up; these patterns drop their pair.  If the threshold is above a half, the patterns below the bound
    are instead those that keep their pair.  So at most half of all patterns are below a bound, and neither NaN, which
    compares as neither less nor greater, nor plus infinity need be among them.  The two zeros are equal, so no bound
    lies between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...model.attention_spec import AttentionSpec
from ...model.dropout import ROUNDS, STEPS, Dropout

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, ...]:
    """Returns the four words of the Philox4x32 blocks with these counters and keys: int64 tensors of 32-bit words.

    counter: the four 32-bit words of each counter, int64; key: the two 32-bit words of each key, int64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The products wrap around, but all of their 64 bits are there.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(second) ^ c1 ^ k0, second & _LOW, _high(first) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & _LOW


def random_bits(seed: Tensor, b: int, head: int, rows: Tensor, keys: Tensor) -> Tensor:
    """Returns the 16 random bits for every (query, key) pair of a query head: int64 [len(rows), len(keys)].

    Args:
        seed: the call's seed, int64 [1].
        b: the batch element.
        rows, keys: positions of queries and of keys, integers.
    """
    rows, keys = rows.to(torch.int64)[:, None], keys.to(torch.int64)[None, :]
    blocks = (rows >> 4) * 8 + (rows & 7), (keys >> 4) * 4 + ((keys >> 1) & 3)
    counters = torch.broadcast_tensors(*blocks, torch.full_like(rows, head), torch.full_like(rows, b))
    words = torch.stack(philox((counters[0], counters[1], counters[2], counters[3]), (seed & _LOW, _high(seed))))
    chosen = 2 * ((rows >> 3) & 1) + ((keys >> 3) & 1)
    word = words.gather(0, chosen.expand_as(counters[0])[None])[0]
    return (word >> ((keys & 1) * 16)) & 0xFFFF


def kept(dropout: Dropout, seed: Tensor, b: int, head: int, rows: Tensor, keys: Tensor) -> Tensor:
    """Returns whether dropout keeps the probabilities of a query head: booleans [len(rows), len(keys)].

    Args:
        seed, b, rows, keys: as for `random_bits`.
    """
    rank = ranks(random_bits(seed, b, head, rows, keys))
    drops = dropout.threshold <= STEPS // 2
    return rank >= dropout.threshold if drops else rank < STEPS - dropout.threshold


def ranks(bits: Tensor) -> Tensor:
    """Returns the rank of each 16-bit pattern, as a bfloat16 number, among all 2**16 patterns; NaN come last."""
    return torch.where(bits >= 0x8000, 0xFF80 - bits, bits + 0x7F81) & 0xFFFF


@dataclass(frozen=True)
class ElementDropout:
    """The dropout of one batch element of a call.

    Attributes:
        b: the index of the batch element.
        dropout, seed: the call's dropout and its seed, int64 [1]; None where nothing is dropped.
    """

    b: int
    dropout: Dropout | None = None
    seed: Tensor | None = None

    @staticmethod
    def of(extras: Sequence[Tensor], spec: AttentionSpec, b: int) -> ElementDropout:
        return (
            ElementDropout(b)
            if spec.dropout is None
            else ElementDropout(b, spec.dropout, extras[spec.dropout.seed.index])
        )

    def kept(self, values: Tensor, head: int, rows: slice, keys: slice) -> Tensor:
        """Returns `values` [rows, keys] of a query head's (query, key) pairs, with zeros where dropout drops a pair."""
        if self.dropout is None or self.seed is None:
            return values
        positions = (torch.arange(part.start, part.stop, device=values.device) for part in (rows, keys))
        return torch.where(kept(self.dropout, self.seed, self.b, head, *positions), values, 0.0)

    def rescaled(self, values: Tensor) -> Tensor:
        """Returns `values` times the factor that makes up for dropped probabilities, or as they are without dropout."""
        return values if self.dropout is None else values * self.dropout.rescale
