"""The reports of the tool racecheck of compute-sanitizer, by the functions of the Hopper kernel."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from .distribution import ROOT

HOPPER = ROOT / "kernels" / "hopper"
FILES = {path.name: path for room in ("shared", "backward") for path in (HOPPER / room / "device").glob("*.py")}
"""The device code of the backward: a report gives the name of a file without its folder."""


def races(lines: Iterable[str]) -> set[frozenset[str]]:
    """Pairs of accesses that are reported as a race, each as ``file function``.

    Raises:
        ValueError: a report in another form, which may hide a race: without a summary, with a race that has no second
            access, or with a line about races that names no access.
    """
    found = set()
    first, alone = "", False
    for line in lines:
        is_summary = "RACECHECK SUMMARY" in line
        if alone and (is_summary or "Race reported" in line):
            raise ValueError(f"line of a report: {line!r}; a line about hazards should come before it")
        if is_summary:
            return found
        if "Race reported" in line:
            first, alone = _function(line), True
        elif "hazard" in line:
            if not first:
                raise ValueError(f"line of a report: {line!r}; a line about hazards follows one that reports a race")
            found.add(frozenset((first, _function(line))))
            alone = False
    raise ValueError("report: without a line with RACECHECK SUMMARY, at which it ends")


def _function(line: str) -> str:
    access = re.search(r"access at \S+ in (\S+):(\d+)", line)
    if access is None:
        raise ValueError(f"line of a report: {line!r}; it should name an access with its file and line")
    file, number = access[1], int(access[2])
    if file not in FILES:
        return f"{file} {number}"
    nodes = ast.walk(ast.parse(FILES[file].read_text()))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    inside = [f.name for f in functions if f.lineno <= number <= (f.end_lineno or 0)]
    return f"{file} {inside[-1] if inside else number}"
