"""Imports go one way: a room imports only rooms above it in the list of the contributing page, and no circle exists."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from .support.distribution import ROOT
from .support.rooms import Package, block, room_of

PAGE = ROOT / "docs" / "contributing.md"
FOLDERS = {ROOT / "dash_inductor": "", ROOT / "kernels": "kernels", ROOT / "lowering": "lowering"}
PACKAGE = Package("dash_inductor", FOLDERS, tuple(ROOT.glob("_dash_inductor_*.py")))


MOST_PARAMETERS = 20


def parameters(path: Path) -> dict[str, int]:
    """How many parameters each function of a source has, by the place where it begins."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {f"{path}:{f.lineno}": sum(isinstance(part, ast.arg) for part in ast.walk(f.args)) for f in functions}


def test_a_room_imports_only_rooms_above_it() -> None:
    assert PACKAGE.against(block(PAGE, "rooms")) == []


def test_no_room_imports_the_package_itself() -> None:
    """`dash_inductor/__init__.py` stands above all of them."""
    assert [module for module, names in PACKAGE.graph.items() if "" in names] == []


def test_attention_stands_without_the_passes_of_other_operators() -> None:
    """The lists of passes and of operators and the installation alone import `passes.ops`, which needs no attention."""
    of_ops = {module for module in PACKAGE.graph if module.startswith("passes.ops")}
    importers = {module for module, names in PACKAGE.graph.items() if names & of_ops} - of_ops
    assert importers == {"passes.all", "operators.all", "install.installation"}
    assert not [m for m in of_ops for name in PACKAGE.graph[m] if name.startswith(("passes.attention", "passes.all"))]


def test_there_is_no_circle() -> None:
    TopologicalSorter(PACKAGE.graph).prepare()  # raises CycleError, which names it


def test_an_import_against_the_order_is_seen(tmp_path: Path) -> None:
    """In a function, for types, of a module or of a name in it."""
    source = tmp_path / "wrong.py"
    for line in (
        "from ..kernels import registry",
        "from ..kernels.registry import forward",
        "import dash_inductor.kernels.registry",
    ):
        source.write_text(f"def f():\n    {line}\n")
        assert PACKAGE.imports("model.wrong", source) == {"kernels.registry"}
    rooms = block(PAGE, "rooms")
    assert room_of("kernels.registry", rooms) > room_of("model.wrong", rooms)
    assert room_of("kernels.hopper.forward.launch", rooms) < room_of("kernels.registry", rooms)


def test_no_function_has_more_than_twenty_parameters(tmp_path: Path) -> None:
    """What belongs together is one argument, such as a group of `kernels.common.arguments`; there is no exception."""
    found = {place: number for path in PACKAGE.modules.values() for place, number in parameters(path).items()}
    assert {place: number for place, number in found.items() if number > MOST_PARAMETERS} == {}
    source = tmp_path / "long.py"
    source.write_text(f"def f({', '.join(f'a{i}' for i in range(MOST_PARAMETERS))}, *, b): ...\n", encoding="utf-8")
    assert parameters(source) == {f"{source}:1": MOST_PARAMETERS + 1}
