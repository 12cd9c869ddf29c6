"""Runs programs under compute-sanitizer, and reads the races in its reports by functions of the Hopper kernel."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable

import pytest

from .distribution import ROOT

HOPPER = ROOT / "kernels" / "hopper"
_TOOL = shutil.which("compute-sanitizer")
needed = pytest.mark.skipif(_TOOL is None, reason="compute-sanitizer is not in PATH")

FILES = {path.name: path for room in ("shared", "backward") for path in (HOPPER / room / "device").glob("*.py")}
"""The device code of the backward: a report gives the name of a file without its folder."""


def report(tool: str, module: str, *arguments: str) -> list[str]:
    """Runs a module of `tests.support`, which prints "done" at its end, under a tool of compute-sanitizer.

    Returns:
        The lines of its output and of the tool's report.
    """
    command = [str(_TOOL), "--tool", tool, "--print-limit", "1000000", "--show-backtrace", "no"]
    command += ["--report-api-errors", "no"] * (tool == "memcheck")  # Triton 3.9 asks for what older drivers refuse
    command += [sys.executable, "-m", f"tests.support.{module}", *arguments]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor is an allocation that the tool knows
    with tempfile.TemporaryDirectory() as cache:  # kernels of other runs have other line tables: see plain_lines.py
        env |= {"TRITON_CACHE_DIR": cache}
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    lines = run.stdout.splitlines()
    assert "done" in lines, run.stdout[-2000:] + run.stderr[-2000:]
    return lines


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
