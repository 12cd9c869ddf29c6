"""Numbers that pages give as measured, and the results files that have them.

A page names its sources in comments that readers do not see. A comment in a paragraph, list item or row of a table, as
at its end, is about this block alone; one between blank lines is about the paragraph, list or table below it.

    <!-- measured: host_h100: us; masks_h100: dash forward / flex forward where 16 in 32k -->
    <!-- not measured: simulated -->
    <!-- not measured: 16, 256: limits -->

The first names sources, one after the other: a file of benchmarks/results; a column of it (in files with many
numbers), which may have wildcards; a ratio of two columns of one row, or of one column in two rows if both names are
equal; and texts that a row must have. The ends of a range ("0.9 to 1.1") are the smallest and the largest number of
one source, or of several with " + " between them; "up to 8" is the largest, "up to 8 %" the largest above or below 1.
The second comment is about all numbers of a block, the third about those it lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise, permutations
from pathlib import Path
from statistics import median
from typing import Any

from ..support.distribution import ROOT

RESULTS = ROOT / "benchmarks" / "results"
FEW = 64
"""A file with more numbers than these is named with a column: else it would have a number for everything."""
UNITS = {
    "us": ("time", 1e-6),
    "µs": ("time", 1e-6),
    "microseconds": ("time", 1e-6),
    "ms": ("time", 1e-3),
    "s": ("time", 1.0),
    "seconds": ("time", 1.0),
    "mib": ("memory", 2.0**20),
    "gib": ("memory", 2.0**30),
    "mb": ("memory", 1e6),
    "gb": ("memory", 1e9),
    "tflop/s": ("", 1.0),
    "tflops": ("", 1.0),
    "tb/s": ("bandwidth", 1e12),
    "gb/s": ("bandwidth", 1e9),
    "times": ("", 1.0),
    "%": ("%", 1.0),
    "": ("", 1.0),
}
"""Units in lower case: what they measure, and what one of them is. Rates and ratios are plain numbers in the files."""
_UNIT = r"TFLOP/s|TB/s|GB/s|microseconds|seconds|times|[GM]iB|[GM]B|ms|us|µs|s|%"
_NUMBER = r"(?<![\w.^/+·=-])(?:\d{1,6}(?:\.\d+)?|\.\d+)(?!\.?\d|[\w^]|-\w)"
_CHAIN = rf"{_NUMBER}(?:(?:, | and | to | or |, and )(?:{_NUMBER}))*"
_WITH_UNIT = re.compile(rf"({_CHAIN}) ?({_UNIT})(?![\w/])")
_RATIO = re.compile(r"(?<![\w.^/+=-])[01]?\.\d{2,4}(?!\.?\d|[\w^]|-\w)")
_AFTER = r"(?:and|to|where|instead|with|in|for|beside|on|than|without|of|from|at|as|under|if)\b"
_BARE = re.compile(
    rf"\b(?:have|has|had|gave|gives?|reach(?:es|ed)?|takes?|took|costs?|instead of) (?:about )?({_CHAIN})"
    rf"(?=[.,;:)]| \(| {_AFTER}|$)"
)
_BEFORE_INSTEAD = re.compile(rf"({_CHAIN}) instead of")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_MARK = re.compile(r"<!-- (not measured|measured): (.*?) -->", re.DOTALL)
_VERSION = re.compile(r"(?:torch|triton|Python|CUDA|transformers) $", re.IGNORECASE)


@dataclass(frozen=True)
class Quantity:
    """A number as a page shows it, with its unit."""

    shown: str
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.shown} {self.unit}".strip()

    def is_one_of(self, values: Values) -> bool:
        """Is it one of these numbers, at the precision shown?"""
        return any(map(self.is_near, self.alike(values)))

    def is_near(self, value: float) -> bool:
        half = 0.5 * 10.0 ** -len(self.shown.partition(".")[2])
        return abs(value - float(self.shown)) <= half + 1e-9

    def alike(self, values: Values) -> Iterator[float]:
        """Those of the numbers that measure the same, in its unit; what a ratio is above or below 1 for per cents."""
        kind, scale = UNITS[self.unit.lower()]
        for value, column in values:
            of_column, its_scale = unit_of(column)
            if kind == of_column:
                yield value * its_scale / scale
            elif kind == "%" and of_column == "":
                yield abs(value - 1) * 100


Values = list[tuple[float, str]]
"""Numbers of a results file, with their columns; ratios have none."""


def are_ends(low: Quantity, high: Quantity, values: Values) -> bool:
    """Are these two the smallest and the largest of the numbers that measure the same?"""
    found = list(low.alike(values))
    return bool(found) and low.is_near(min(found)) and high.is_near(max(found))


def is_end(number: Quantity, values: Values) -> bool:
    """Is this the largest of the numbers that measure the same, or with per cents the farthest above or below 1?"""
    if number.unit != "%":
        return number.is_near(max(number.alike(values), default=-1.0))
    above = [(value, column) for value, column in values if value >= 1]
    below = [(value, column) for value, column in values if value < 1]
    return any(number.is_near(max(number.alike(side), default=-1.0)) for side in (above, below))


def unit_of(column: str) -> tuple[str, float]:
    """What a column of a results file measures, by its name."""
    found = re.findall(r"(?<![A-Za-z])(?:ms|us|s|GiB|MiB|mib|%)(?![A-Za-z])", column.replace("_", " "))
    if "relative" in column:
        return UNITS[""]
    return UNITS[found[0].lower()] if found else UNITS[""]


@dataclass
class Block:
    """A paragraph, a list item, or a row of a table."""

    line: int
    kind: str
    text: str
    marks: list[tuple[str, str]] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    """The titles of a table's columns."""
    contexts: list[str] = field(default_factory=list)
    """What may say which GPU was measured, the nearest text first: the paragraph above, the section's, the page's."""

    def quantities(self) -> list[Quantity]:
        """Numbers that look measured."""
        cells = [cell.strip() for cell in plain(self.text).strip("| ").split("|")] if self.kind == "row" else []
        if not cells:
            return found_in(plain(self.text))
        found = []
        for i, cell in enumerate(cells):
            title = self.head[i] if i < len(self.head) else ""
            unit = re.search(rf"(?:, |\()({_UNIT})\)?$", title)
            whole = re.fullmatch(rf"{_CHAIN}", cell)
            if whole and i and (unit or (self.measured and not re.fullmatch(r"commit|length", title))):
                found += [Quantity(number, unit[1] if unit else "") for number in re.findall(_NUMBER, cell)]
            else:
                found += found_in(cell)
        return found

    @property
    def measured(self) -> list[str]:
        return [text for kind, text in self.marks if kind == "measured"]

    @property
    def sources(self) -> list[list[Source]]:
        """The sources, of which several may be one together."""
        return [joined for text in self.measured for joined in sources(text)]

    def exempt(self) -> set[str] | None:
        """The numbers that are no measurements; None if none of the block's are."""
        shown: set[str] = set()
        for kind, text in self.marks:
            if kind == "not measured":
                listed = re.match(rf"({_NUMBER}(?:, (?:{_NUMBER}))*): .", text)
                if not listed:
                    return None
                shown.update(listed[1].split(", "))
        return shown


def plain(text: str) -> str:
    """Markdown without comments, code, targets of links and stress."""
    text = re.sub(r"`[^`]*`", "CODE", _COMMENT.sub("", text))
    return re.sub(r"!?\[([^\]]*)\](?:\([^)]*\))?", r"\1", text).replace("**", "")


def found_in(text: str) -> list[Quantity]:
    """Numbers with a unit, ratios, and rates, in the order in which they stand."""
    text = " ".join(text.split())
    found: dict[int, Quantity] = {}
    for pattern in (_WITH_UNIT, _RATIO, _BARE, _BEFORE_INSTEAD):
        for match in pattern.finditer(text):
            begin = match.start(1) if match.lastindex else match.start()
            unit = match[2] if match.re is _WITH_UNIT else ""
            for number in re.finditer(_NUMBER, text[begin : match.end(1) if match.lastindex else match.end()]):
                at = begin + number.start()
                small = pattern in (_BARE, _BEFORE_INSTEAD) and re.fullmatch(r"\d", number[0])  # a count
                if not small and not _VERSION.search(text[:at]):
                    found.setdefault(at, Quantity(number[0], unit))
    for chain in re.finditer(_CHAIN, text):
        if _RATIO.search(chain[0]) and not _VERSION.search(text[: chain.start()]):
            for number in re.finditer(_NUMBER, chain[0]):
                if "." in number[0]:
                    found.setdefault(chain.start() + number.start(), Quantity(number[0]))
    return [found[at] for at in sorted(found)]


def blocks(page: str) -> list[Block]:
    """The blocks of a page that are written by hand."""
    page = re.sub(
        r"<!-- ([^>]*): written by tools/\w+\.py -->.*?<!-- end of \1 -->",
        lambda region: "\n" * region[0].count("\n"),
        page,
        flags=re.DOTALL,
    )
    page = re.sub(r"^```.*?^```$", lambda code: "\n" * code[0].count("\n"), page, flags=re.MULTILINE | re.DOTALL)
    return list(_blocks(page))


def _blocks(page: str) -> Iterator[Block]:
    marks: list[tuple[str, str]] = []
    opening = section = above = ""
    kind_above = ""
    head: list[str] = []
    sections = 0
    for line, lines in _groups(page):
        text = "\n".join(lines)
        if text.startswith("#"):
            sections += 1
            section, above, marks, kind_above = text.lstrip("# "), "", [], "heading"
            continue
        if not _COMMENT.sub("", text).strip():
            marks, kind_above = _MARK.findall(text), "comment"
            continue
        kind = _kind(text)
        if kind == "row" and kind_above != "row":
            head = [cell.strip() for cell in plain(text).strip("| ").split("|")]
        if kind_above != "comment" and (kind == "paragraph" or kind_above != kind):
            marks = []
        contexts = [above, section, opening]
        if not re.fullmatch(r"[|\s:-]+", text) and (kind != "row" or kind_above == "row"):
            yield Block(line, kind, text, [*marks, *_MARK.findall(text)], head, contexts)
        if kind == "paragraph":
            above, marks = text, []
            if sections <= 1:
                opening += "\n" + text
            elif section.count("\n") == 0:
                section += "\n" + text
        kind_above = kind


def _kind(text: str) -> str:
    if text.startswith("|"):
        return "row"
    return "item" if re.match(r"\s*(?:[-*+]|\d{1,2}\.) ", text) else "paragraph"


def _groups(page: str) -> Iterator[tuple[int, list[str]]]:
    """Lines that belong together, with the number of the first one."""
    group: list[str] = []
    begin = 0
    for number, line in enumerate([*page.splitlines(), ""], 1):
        definition = bool(re.match(r"\[[^\]]+\]: ", line))
        alone = line.startswith(("|", "#"))
        if group and (alone or definition or not line.strip() or _kind(line) == "item"):
            yield begin, group
            group = []
        if alone:
            yield number, [line]
        elif line.strip() and not definition:
            begin = begin if group else number
            group.append(line)


@dataclass(frozen=True)
class Source:
    """A results file, or columns or a ratio in some of its rows."""

    name: str
    column: str = ""
    other: str = ""
    texts: tuple[str, ...] = ()

    def __str__(self) -> str:
        ratio = f"{self.column} / {self.other}" if self.other else self.column
        where = f" where {' & '.join(self.texts)}" if self.texts else ""
        return (f"{self.name}: {ratio}" if ratio else self.name) + where

    def rows(self) -> list[Row]:
        """The rows that have the column and all of the texts, whose numbers are not parts of longer ones."""
        patterns = [re.sub(r"^(?=\d)", r"(?<!\\d)", re.escape(text)) + r"(?!\d)" for text in self.texts]
        having = [row for row in rows(self.name) if all(re.search(pattern, row.text) for pattern in patterns)]
        return [row for row in having if not self.column or any(_fits(name, self.column) for name in row.numbers)]

    def values(self) -> Values:
        """The numbers that a page may show."""
        columns = [(column, value, i) for i, row in enumerate(self.rows()) for column, value in row.numbers.items()]
        if not self.column and len(columns) > FEW:
            raise ValueError(f"{self.name}: a column must be named, because it has {len(columns)} numbers")
        first = [found for found in columns if not self.column or _fits(found[0], self.column)]
        if not self.other:
            return [(value, column) for column, value, _ in first]
        second = [found for found in columns if _fits(found[0], self.other)]
        if self.column == self.other:
            pairs = [(a, b) for a, b in permutations(first, 2) if a[0] == b[0]]
        else:
            pairs = [(a, b) for a in first for b in second if a[2] == b[2] and a[0] != b[0]]
        return [(a[1] / b[1], "") for a, b in pairs if b[1] and unit_of(a[0]) == unit_of(b[0])]


def _fits(column: str, pattern: str) -> bool:
    """Is this the column, or one of those, that a comment names?"""
    return column.count(".") == pattern.count(".") and fnmatchcase(column, pattern)


def sources(mark: str) -> list[list[Source]]:
    """The sources that a comment names, of which several may be one together."""
    return [[_source(text) for text in joined.split(" + ")] for joined in " ".join(mark.split()).split("; ")]


def _source(text: str) -> Source:
    what, _, where = text.partition(" where ")
    name, _, columns = what.partition(": ")
    column, _, other = columns.partition(" / ")
    return Source(name, column, other, tuple(filter(None, where.split(" & "))))


@dataclass(frozen=True)
class Row:
    """A row of a results file: its numbers by the names of their columns, its texts, and what was measured on what."""

    numbers: dict[str, float]
    text: str
    gpu: str
    """As pages write it, such as H100; empty if nobody wrote it down."""
    commit: str
    """Its hash, or empty."""


def path_of(name: str) -> Path:
    return RESULTS / f"{name}.json"


@cache
def rows(name: str) -> tuple[Row, ...]:
    """All rows of a file, those of its runs too."""
    found: dict[str, Any] = json.loads(path_of(name).read_text(encoding="utf-8"))
    listed = []
    for run in found.get("runs", [found]):
        its_rows, of_run = (run, {}) if isinstance(run, list) else (run.get("rows", []), run)
        for row in its_rows:
            said = [row, of_run, of_run.get("conditions", {}), found.get("conditions", {})]
            gpu = _first(r"\b([HAB]\d{3})\b.*", [part.get("gpu", "") for part in said])
            commit = _first(r"([0-9a-f]{7,40})", [part.get("commit", "") for part in said])
            listed.append(Row(dict(_numbers("", row)), "\n".join(_texts(row)), gpu, commit))
    return tuple(listed)


def _first(pattern: str, texts: list[str]) -> str:
    return next((match[1] for text in texts if (match := re.fullmatch(rf"(?:NVIDIA )?{pattern}", text))), "")


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    """Columns and numbers. What `benchmarks.trees` writes as a text is a rate, and what it is of the first copy's."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(f"{name}.{key}" if name else key, part)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _numbers(f"{name}.{i}", part)
        if len(value) >= 3 and all(isinstance(part, float) for part in value):
            yield name, median(value)
    elif isinstance(value, str) and (both := re.fullmatch(r"([\d.]+) \(([\d.]+)\)", value)):
        yield f"{name}.rate", float(both[1])
        yield f"{name}.relative", float(both[2])


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            if key in ("shape", "call", "what", "case", "model", "variant", "site", "contender", "product", "step"):
                yield from _texts(part)


def problems(page: str) -> Iterator[str]:
    """What is wrong with the numbers of a page, a line for each block."""
    for block in blocks(page):
        found, exempt = block.quantities(), block.exempt()
        if block.measured and exempt is None:
            yield f"line {block.line}: it says that its numbers are measured and that they are not"
        elif block.measured:
            yield from (f"line {block.line}: {text}" for text in _unfounded(block, found, exempt or set()))
        elif exempt is not None and (left := [number for number in found if number.shown not in exempt]):
            yield f"line {block.line}: no source is named for {', '.join(map(str, left))}"


def _unfounded(block: Block, found: list[Quantity], exempt: set[str]) -> Iterator[str]:
    given = [source for joined in block.sources for source in joined]
    if absent := [source.name for source in given if not path_of(source.name).exists()]:
        yield f"there is no results file {', '.join(absent)}"
        return
    if empty := [source for source in given if not source.values()]:
        yield f"nothing is found for {empty[0]}"
        return
    values = [[value for source in joined for value in source.values()] for joined in block.sources]
    left = [number for number in found if number.shown not in exempt]
    if wrong := [number for number in left if not any(number.is_one_of(joined) for joined in values)]:
        yield f"{', '.join(map(str, wrong))}: not in {', '.join(sorted({source.name for source in given}))}"
        return
    for low, high in ranges_in(block, left):
        if not any(are_ends(low, high, joined) for joined in values):
            yield f"{low.shown} to {high}: not the smallest and the largest of a source"
    text = " ".join(plain(block.text).split())
    for number in dict.fromkeys(left):
        if re.search(rf"up to {number}(?!\w)", text) and not any(is_end(number, joined) for joined in values):
            yield f"up to {number}: not the largest of a source"
    if not left and block.kind != "row" and _MARK.search(block.text):
        yield "it has no number that looks measured"
    gpus = {row.gpu for source in given for row in source.rows()}
    texts = (block.text, *block.contexts)
    said = next(filter(None, (set(re.findall(r"\b[HAB]\d{3}", plain(text))) for text in texts)), set())
    if left and not gpus <= said:
        yield f"{' and '.join(sorted(gpus - said))}: the text does not name this GPU"


def ranges_in(block: Block, found: list[Quantity]) -> list[tuple[Quantity, Quantity]]:
    """Neighbours among these numbers of a block with "to" between them."""
    text = " ".join(plain(block.text).split())
    return [(a, b) for a, b in pairwise(found) if re.search(rf"(?<![\w.]){a.shown} to {b.shown}(?!\.?\d)", text)]
