"""Write the tables of models in docs/replaced.md from tests/golden: ``python tools/model_tables.py``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, LINES = ROOT / "docs" / "replaced.md", ROOT / "tests" / "golden" / "models.json"
PROGRAMS = ROOT / "tests" / "golden" / "programs.json"
BEGIN, END = "<!-- models: written by tools/model_tables.py -->\n", "<!-- end of models -->"
PROGRAMS_BEGIN, PROGRAMS_END = "<!-- programs: written by tools/model_tables.py -->\n", "<!-- end of programs -->"
COLUMNS = {"tokens or images alone": ("plain",), "`attention_mask`": ("right",), "packed": ("packed",)}
"""Columns, with the kinds of inputs that they hold."""
DEVICES = ("cpu", "cuda")
OTHERS = "other versions of transformers"


def table(lines: dict[str, Any]) -> str:
    """The table in Markdown: a row for each family and, where there is any, one with its default dropout."""
    text = ["model", *COLUMNS]
    rows = [text, ["---"] * len(text)]
    rows += [[_title(*row), *_cells(lines, *row)] for row in _rows(lines)]
    return _markdown(rows)


def differences(lines: dict[str, Any]) -> str:
    """The differences with other versions of transformers: a sentence, and a table of the rows that have any."""
    text = ["transformers", "model", *COLUMNS]
    rows = []
    same = []
    for version, others in lines[OTHERS].items():
        merged = {device: lines[device] | others[device] for device in DEVICES}
        found = [(row, _cells(lines, *row), _cells(merged, *row)) for row in _rows(lines)]
        changed = [
            [version, _title(*row), *("" if a == b else b for a, b in zip(ours, theirs, strict=True))]
            for row, ours, theirs in found
            if ours != theirs
        ]
        rows += changed
        same += [] if changed else [version]
    parts = [f"With transformers {' and '.join(same)} all lines are the same.\n"] if same else []
    if rows:
        parts.append("With other versions of transformers these lines differ; an empty cell is as above.\n")
        parts.append(_markdown([text, ["---"] * len(text), *rows]))
    return "\n".join(parts)


def programs(found: dict[str, Any]) -> str:
    """The table of real programs: package and version, model, what it calls, and what becomes of that."""
    rows = [["package", "model", "attention", "what becomes of it"], ["---"] * 4]
    for program, line in found["lines"].items():
        package, rest = program.split(" ", 1)
        parts = re.fullmatch(
            r"(.*) (flex.*|varlen|SDPA|by hand|flash_att.*|FlashAttention-3|its .*|dash_inductor.*)", rest
        )
        model, attention = parts.groups()  # type: ignore[union-attr]
        rows.append([f"{package} {found['versions'][package]}", model, attention, _short(line)])
    return _markdown(rows)


def _markdown(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _rows(lines: dict[str, Any]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(_row(name) for name in lines["cuda"]))


def _title(family: str, dropout: str) -> str:
    return f"{family}, default dropout" if dropout else family


def _cells(lines: dict[str, Any], family: str, dropout: str) -> list[str]:
    return [_cell(lines, family, kinds, dropout) for kinds in COLUMNS.values()]


def _row(name: str) -> tuple[str, str]:
    family, _, *dropout = name.split(" ")
    return family, " ".join(dropout)


def _cell(lines: dict[str, Any], family: str, kinds: tuple[str, ...], dropout: str) -> str:
    texts = {}
    for device in DEVICES:
        found = lines[device]
        names = [" ".join(filter(None, (family, kind, dropout))) for kind in kinds]
        texts[device] = "; ".join(dict.fromkeys(_short(found[name]) for name in names if name in found))
    return texts["cuda"] if texts["cuda"] == texts["cpu"] else f"{texts['cuda']} (CPU: {texts['cpu']})"


def _short(line: str) -> str:
    """Returns a line without operand indices, and without the number of sites if all have the same outcome."""
    parts = re.sub(r"(?<!band)\(\d+(,\d+)*\)", "", line).split(", ")
    if len(parts) == 1:
        return re.sub(r"^\d+ ", "", parts[0])
    return ", ".join(re.sub(r"^(\d+) (.*)$", r"\2 (\1)", part) for part in parts)


def filled(page: str, lines: dict[str, Any], others: dict[str, Any]) -> str:
    """The page with the tables of these lines, and the versions that they were made with."""
    versions = " and ".join(f"{name} {version}" for name, version in lines["versions"].items())
    parts = [f"This is with {versions}.\n", table(lines), differences(lines)]
    page = _between(page, BEGIN, END, "\n".join(filter(None, parts)))
    return _between(page, PROGRAMS_BEGIN, PROGRAMS_END, programs(others))


def _between(page: str, begin: str, end: str, text: str) -> str:
    head, rest = page.split(begin)
    return f"{head}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}"


def main() -> None:
    lines = json.loads(LINES.read_text(encoding="utf-8"))
    others = json.loads(PROGRAMS.read_text(encoding="utf-8"))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), lines, others), encoding="utf-8")


if __name__ == "__main__":
    main()
