"""The visible tile pairs of one batch element, classified by evaluating the mask for each element.

This slow definition is the reference for `kernels/common/device/tile_pairs.py`.  A tile pair is *empty* iff no existing
row sees an existing key, and *full* iff a kernel may skip the mask there, as `geometry` defines it: every existing row
sees every key, and the kv tile is complete.  Every other pair is *partial*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import ArgumentError
from ..model.mask import Band

EMPTY, PARTIAL, FULL = range(3)

Pairs = Sequence[Sequence[int]]
"""The tile pairs of one batch element: ``pairs[q][kv]`` is EMPTY, PARTIAL or FULL."""


def sees(
    band: Band,
    q_len: int,
    kv_len: int,
    valid: Sequence[object] | None = None,
    segments: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Callable[[int, int], bool]:
    """Return a function of i and j: whether query i sees key j of one batch element, under a band and vectors.

    Args:
        band: the band of the mask.
        q_len, kv_len: the lengths.
        valid: a boolean for each key; None if all are valid.
        segments: a segment id for each query and one for each key, any integers; a query sees the keys with its own id.

    Raises:
        ArgumentError: a vector of another length.
    """
    vectors: list[tuple[str, Sequence[object] | None, int]] = [("valid", valid, kv_len)]
    if segments is not None:
        vectors += [("segments[0]", segments[0], q_len), ("segments[1]", segments[1], kv_len)]
    for name, vector, length in vectors:
        if vector is not None and len(vector) != length:
            raise ArgumentError(f"length of {name}", len(vector), f"{length}")

    def seen(i: int, j: int) -> bool:
        return (
            band.visible(i, j, q_len, kv_len)
            and (valid is None or bool(valid[j]))
            and (segments is None or segments[0][i] == segments[1][j])
        )

    return seen


def tile_pairs(
    seen: Callable[[int, int], bool], q_len: int, kv_len: int, block_q: int, block_kv: int
) -> list[list[int]]:
    """Return the kinds of all tile pairs, [q tiles][kv tiles], EMPTY, PARTIAL or FULL, of one batch element.

    Query i sees key j iff ``seen(i, j)``.
    """

    def kind(q: int, kv: int) -> int:
        rows = range(q * block_q, min((q + 1) * block_q, q_len))
        keys = range(kv * block_kv, min((kv + 1) * block_kv, kv_len))
        values = {seen(i, j) for i in rows for j in keys}
        if True not in values:
            return EMPTY
        return FULL if False not in values and len(keys) == block_kv else PARTIAL

    return [[kind(q, kv) for kv in range(-(-kv_len // block_kv))] for q in range(-(-q_len // block_q))]
