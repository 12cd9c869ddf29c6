"""Names that tests import inside of functions exist: a test that needs a GPU would not fail without one."""

from __future__ import annotations

import ast
import importlib
from importlib.util import find_spec, resolve_name
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FIRST_PARTY = ("benchmarks", "dash_inductor", "examples", "tests", "tools")


def absent(source: str, package: str = HERE.name) -> list[str]:
    """First-party modules and names that functions of a test file in this package import, and that do not exist."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    imports = {node for function in functions for node in ast.walk(function) if isinstance(node, ast.ImportFrom)}
    missing = []
    for node in imports:
        module = resolve_name("." * node.level + (node.module or ""), package)
        if module.split(".")[0] in FIRST_PARTY:
            missing += [f"{module}.{alias.name}" for alias in node.names if not exists(module, alias.name)]
    return sorted(missing)


def exists(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or find_spec(f"{module}.{name}") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("file", sorted(HERE.rglob("test_*.py")), ids=lambda file: str(file.relative_to(HERE)))
def test_names_exist(file: Path) -> None:
    assert absent(file.read_text(), ".".join(file.relative_to(HERE.parent).parent.parts)) == []


def test_absent_names_are_found() -> None:
    source = (
        "def f():\n    from examples import nothing, training\n    from .nowhere import x\n    from torch import no\n"
    )
    assert absent(source) == ["examples.nothing", "tests.nowhere.x"]
