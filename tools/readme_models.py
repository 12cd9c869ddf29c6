"""Write the README's table of models from tests/golden/models.json: ``python tools/readme_models.py``."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README, LINES = ROOT / "README.md", ROOT / "tests" / "golden" / "models.json"
BEGIN, END = "<!-- models: written by tools/readme_models.py -->\n", "<!-- end of models -->"
COLUMNS = {"tokens or images alone": ("plain",), "`attention_mask`": ("right",), "packed": ("packed",)}
"""Columns, with the kinds of inputs that they hold."""


def table(lines: dict[str, dict[str, str]]) -> str:
    """The table in Markdown: a row for each family and, where there is any, one with its default dropout."""
    text = ["model", *COLUMNS]
    rows = [text, ["---"] * len(text)]
    for family, dropout in dict.fromkeys(_row(name) for name in lines["cuda"]):
        title = f"{family}, default dropout" if dropout else family
        rows.append([title, *(_cell(lines, family, kinds, dropout) for kinds in COLUMNS.values())])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(name: str) -> tuple[str, str]:
    family, _, *dropout = name.split(" ")
    return family, " ".join(dropout)


def _cell(lines: dict[str, dict[str, str]], family: str, kinds: tuple[str, ...], dropout: str) -> str:
    texts = {}
    for device in ("cpu", "cuda"):
        found = lines[device]
        names = [" ".join(filter(None, (family, kind, dropout))) for kind in kinds]
        texts[device] = "; ".join(dict.fromkeys(_short(found[name]) for name in names if name in found))
    return texts["cuda"] if texts["cuda"] == texts["cpu"] else f"{texts['cuda']} (CPU: {texts['cpu']})"


def _short(line: str) -> str:
    """A line without the places of operands, and without the number of sites where all have one fate."""
    parts = re.sub(r"(?<!band)\(\d+(,\d+)*\)", "", line).split(", ")
    if len(parts) == 1:
        return re.sub(r"^\d+ ", "", parts[0])
    return ", ".join(re.sub(r"^(\d+) (.*)$", r"\2 (\1)", part) for part in parts)


def filled(readme: str, lines: dict[str, dict[str, str]]) -> str:
    """The README with the table of these lines."""
    head, rest = readme.split(BEGIN)
    return head + BEGIN + "\n" + table(lines) + "\n" + END + rest.split(END, 1)[1]


def main() -> None:
    lines = json.loads(LINES.read_text(encoding="utf-8"))
    README.write_text(filled(README.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main()
