"""The work list of a forward over packed documents: the q tiles of all documents, those with most kv tiles first.

A q tile belongs to one document, and its results do not depend on its place in the list.  Longest work first keeps the
last tiles short, so that all CTAs end at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..model.mask import Band
from . import codegen
from .tile_schedule import Problem

WORDS = 5
"""int32 values of an entry of the list."""

NOWHERE = 1 << 29
"""A lower bound of the band that hides every key from every query."""
EVERYWHERE = -NOWHERE
"""A lower bound that hides nothing, for a band without one: the kernels test it all the same."""


def document_band(has_hi: bool) -> Band:
    """Returns a band of the form of which kernels of packed documents are made, whatever the value of its bounds.

    It always has a lower bound.
    """
    return Band(0, 0) if has_hi else Band(0)


class QTile(NamedTuple):
    """An entry of the list.

    Attributes:
        first_block: the tile's first row block, counted from the first one of its document.  It is negative if the
            document has no whole number of tiles: the first tile of a document has fewer row blocks.
        token: the document's first token.
        row: the document's first padded row, see `model.VarlenLayout`; its first token where there is no such layout.
        length: the tokens of the document, > 0; or, for tokens after the last document, which see no key, minus the
            number of those in the same `ALIGNMENT` rows.
        element: the batch element; 0 with a varlen layout.
    """

    first_block: int
    token: int
    row: int
    length: int
    element: int = 0


def most_q_tiles(problem: Problem) -> int:
    """Returns how many q tiles a work list of the documents of a mask has room for.

    A batch element whose documents need more than twice the q tiles of one document is not in the list: tiles of so
    short documents would be mostly empty.  So whether it is depends on the batch element alone.

    problem: the lengths, and block_q rows per q tile.
    """
    return problem.batch * 2 * problem.n_q


def q_tiles(documents: Sequence[tuple[int, ...]], problem: Problem, consumers: int) -> list[QTile]:
    """Returns the list.

    Args:
        documents: (token, row, length) and, where there are several, the batch element of each, as in `QTile`, by batch
            element and row.
        problem: the band, and the sizes of row blocks and kv tiles (block_q, block_kv).
        consumers: row blocks per q tile.
    """
    rows, keys, band = problem.block_q, problem.block_kv, problem.resolved.band
    lo, hi = (EVERYWHERE if band.lo is None else band.lo), (0 if band.hi is None else band.hi)
    kv_range = codegen.python_functions("two_pass", document_band(band.hi is not None)).dash_kv_range
    found: list[tuple[int, int, QTile]] = []
    for token, row, length, *element in documents:
        tile_schedule = (abs(length), abs(length), lo if length > 0 else NOWHERE, hi)
        blocks = -(-abs(length) // rows)
        for i in range(-(-blocks // consumers)):
            first_block = blocks - (i + 1) * consumers
            first, *_ = kv_range(max(first_block, 0), tile_schedule, rows, keys)
            *_, end = kv_range(first_block + consumers - 1, tile_schedule, rows, keys)
            steps = max(end, 1) - min(first, max(end, 1) - 1)
            found.append((-steps, len(found), QTile(first_block, token, row, length, *element)))
    return [entry for _, _, entry in sorted(found)]
