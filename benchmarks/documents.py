"""Lengths of the packed documents in the benchmarks."""

from __future__ import annotations

PARTS = (5, 8, 10, 12, 13, 15, 17, 20)
"""Lengths of documents, in parts of their sum, over and over."""


def packed(count: int, length: int) -> tuple[int, ...]:
    """The ends of so many documents in a row of tokens."""
    parts = [PARTS[i % len(PARTS)] for i in range(count)]
    return tuple(length * sum(parts[: i + 1]) // sum(parts) for i in range(count))


def zipf(count: int, length: int) -> tuple[int, ...]:
    """The ends of so many documents in a row of tokens, the i-th of which has a share in proportion to 1 / i."""
    shares = [1 / i for i in range(1, count + 1)]
    return tuple(round(length * sum(shares[: i + 1]) / sum(shares)) for i in range(count))


def skewed(long: int, count: int, short: int) -> tuple[int, ...]:
    """The ends of one long document and of `count` short ones behind it."""
    return (long, *(long + short * i for i in range(1, count + 1)))
