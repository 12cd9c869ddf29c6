"""Formats headings, fields and tables as text of a given width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTH = 100


@dataclass(frozen=True)
class Heading:
    """A heading in a text, after an empty line; with an empty text, only the empty line."""

    text: str


@dataclass(frozen=True)
class Fields:
    """A block of labels with their texts; pairs without a text are left out."""

    pairs: tuple[tuple[str, str], ...]

    @property
    def known(self) -> list[tuple[str, str]]:
        """The pairs of a label and a text whose text is not empty."""
        return [(label, text) for label, text in self.pairs if text]


@dataclass(frozen=True)
class Table:
    """A table in a text.

    Args:
        header: the column names; a name that begins with ``>`` marks a column of numbers, aligned right.
        rows: the cells of each row.
        title: a line above the header; "" for none.
        marked: the indices of highlighted rows; None for a table without highlighted rows.

    Columns without a text are left out.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    marked: frozenset[int] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The column names, with an additional column for marks if rows can be highlighted."""
        return self.header if self.marked is None else ("", *self.header)

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The cells of the rows, with an additional cell for the mark if rows can be highlighted."""
        if self.marked is None:
            return list(self.rows)
        return [(">" if number in self.marked else "", *row) for number, row in enumerate(self.rows)]


Block = Heading | Fields | Table


def filled(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the columns of a table that have a text in some row; all columns if there are no rows."""
    kept = [i for i in range(len(header)) if not rows or any(row[i] for row in rows)]
    return tuple(header[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]


def text(blocks: Sequence[Block], width: int = WIDTH) -> str:
    """Formats blocks as text with lines of at most `width` columns."""
    return "\n".join(line.rstrip() for line in _lines(blocks, width)).strip("\n")


def _lines(blocks: Sequence[Block], width: int) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, Heading):
            yield from ("", *(_wrapped(block.text, width) if block.text else ()))
        elif isinstance(block, Fields):
            margin = 2 + max((len(label) for label, _ in block.known), default=0) + 2
            for label, words in block.known:
                first, *rest = _wrapped(words, width - margin)
                yield f"  {label}".ljust(margin) + first
                yield from (" " * margin + line for line in rest)
        else:
            yield from _table(block, width)


def _table(table: Table, width: int) -> Iterator[str]:
    columns, cells = filled(table.columns, table.cells)
    header = tuple(name.removeprefix(">") for name in columns)
    right = [name.startswith(">") for name in columns]
    widths = _widths([header, *cells], width - 2 - 2 * (len(header) - 1))
    yield ""
    if table.title:
        yield f"  {table.title}"
    for row in (header, tuple("-" * n for n in widths), *cells):
        wrapped = [_wrapped(cell, n) for cell, n in zip(row, widths, strict=True)]
        for place in range(max(map(len, wrapped))):
            parts = [lines[place] if place < len(lines) else "" for lines in wrapped]
            parts = [p.rjust(n) if r else p.ljust(n) for p, n, r in zip(parts, widths, right, strict=True)]
            yield "  " + "  ".join(parts).rstrip()


def _widths(rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """The widths of columns: as wide as their texts, but the widest are narrowed until all fit into `room`."""
    widths = [max(1, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    while sum(widths) > room:
        widest = max(range(len(widths)), key=widths.__getitem__)
        widths[widest] -= 1
    return widths


def _wrapped(words: str, width: int) -> list[str]:
    return textwrap.wrap(words, width, break_on_hyphens=False) or [""]
