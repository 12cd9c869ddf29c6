"""Imports go one way: a room imports only rooms above it in the list of the contributing page, and no circle exists."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

from .support.distribution import ROOT

PAGE = ROOT / "docs" / "contributing.md"


def modules() -> dict[str, Path]:
    """The product's files by their names as modules, without the name of the package."""
    roots = {ROOT / "dash_inductor": "", ROOT / "kernels": "kernels", ROOT / "lowering": "lowering"}
    found = {path.stem: path for path in ROOT.glob("_dash_inductor_*.py")}
    for root, prefix in roots.items():
        for path in root.rglob("*.py"):
            parts = [prefix, *path.relative_to(root).with_suffix("").parts]
            found[".".join(filter(None, parts)).removesuffix("__init__").rstrip(".")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The product's modules that a module names in an import: at its top, in functions, or for types."""
    inside = path.name == "__init__.py"
    package = ".".join(filter(None, ("dash_inductor", *name.split(".")[: None if inside else -1])))
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else str(node.module)
            found.update(full if _short(full) in known else base for full in (f"{base}.{a.name}" for a in node.names))
    return {_short(full) for full in found if full.startswith(("dash_inductor", "_dash_inductor"))} - {name}


def _short(name: str) -> str:
    return "" if name == "dash_inductor" else name.removeprefix("dash_inductor.")


def rooms() -> list[list[str]]:
    """The list of the page: a line for each room, which begins with what the room holds."""
    (block,) = re.findall(r"<!-- rooms -->\n.*?```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line.split("  ")[0].split(", ") for line in block.splitlines()]


def room_of(module: str, of: list[list[str]]) -> int:
    """The room with the longest name that the module's name begins with."""
    names = {name.replace("/", "."): number for number, room in enumerate(of) for name in room}
    fitting = [name for name in names if module == name or module.startswith(f"{name}.")]
    assert fitting, f"{module} is in no room of {PAGE.name}"
    return names[max(fitting, key=len)]


MOST_PARAMETERS = 20


def parameters(path: Path) -> dict[str, int]:
    """How many parameters each function of a source has, by the place where it begins."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {f"{path}:{f.lineno}": sum(isinstance(part, ast.arg) for part in ast.walk(f.args)) for f in functions}


GRAPH = {name: imports(name, path, modules()) for name, path in modules().items() if name}


def test_a_room_imports_only_rooms_above_it() -> None:
    of = rooms()
    wrong = [(m, i) for m, names in GRAPH.items() for i in names if i and room_of(i, of) > room_of(m, of)]
    assert not wrong


def test_no_room_imports_the_package_itself() -> None:
    """`dash_inductor/__init__.py` stands above all of them."""
    assert [module for module, names in GRAPH.items() if "" in names] == []


def test_attention_stands_without_the_passes_of_other_operators() -> None:
    """The lists of passes and of operators and the installation alone import `passes.ops`, which needs no attention."""
    of_ops = {module for module in GRAPH if module.startswith("passes.ops")}
    importers = {module for module, names in GRAPH.items() if names & of_ops} - of_ops
    assert importers == {"passes.all", "operators.all", "install.installation"}
    assert not [m for m in of_ops for name in GRAPH[m] if name.startswith(("passes.attention", "passes.all"))]


def test_there_is_no_circle() -> None:
    TopologicalSorter(GRAPH).prepare()  # raises CycleError, which names it


def test_an_import_against_the_order_is_seen(tmp_path: Path) -> None:
    """In a function, for types, of a module or of a name in it."""
    known = {**modules(), "model.wrong": tmp_path / "wrong.py"}
    for line in (
        "from ..kernels import registry",
        "from ..kernels.registry import forward",
        "import dash_inductor.kernels.registry",
    ):
        known["model.wrong"].write_text(f"def f():\n    {line}\n")
        assert imports("model.wrong", known["model.wrong"], known) == {"kernels.registry"}
    of = rooms()
    assert room_of("kernels.registry", of) > room_of("model.wrong", of)
    assert room_of("kernels.hopper.forward.launch", of) < room_of("kernels.registry", of)


def test_no_function_has_more_than_twenty_parameters(tmp_path: Path) -> None:
    """What belongs together is one argument, such as a group of `kernels.common.arguments`; there is no exception."""
    found = {place: number for path in modules().values() for place, number in parameters(path).items()}
    assert {place: number for place, number in found.items() if number > MOST_PARAMETERS} == {}
    source = tmp_path / "long.py"
    source.write_text(f"def f({', '.join(f'a{i}' for i in range(MOST_PARAMETERS))}, *, b): ...\n", encoding="utf-8")
    assert parameters(source) == {f"{source}:1": MOST_PARAMETERS + 1}
