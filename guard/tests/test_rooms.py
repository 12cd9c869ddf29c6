"""Imports of dash_guard go one way, and reach only the modules of dash_inductor that its README lists."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter

from tests.support.distribution import ROOT
from tests.support.rooms import Package, block

PAGE = ROOT / "guard" / "README.md"
GUARD = Package("dash_guard", {ROOT / "guard" / "dash_guard": ""}, (ROOT / "guard" / "_dash_guard_autoload.py",))
CORE = Package(
    "dash_inductor",
    {ROOT / "dash_inductor": "", ROOT / "kernels": "kernels", ROOT / "lowering": "lowering"},
    tuple(ROOT.glob("_dash_inductor_*.py")),
)


def test_a_room_imports_only_rooms_above_it() -> None:
    assert GUARD.against(block(PAGE, "rooms")) == []


def test_there_is_no_circle() -> None:
    TopologicalSorter(GUARD.graph).prepare()  # raises CycleError, which names it


def test_only_what_is_listed_is_imported_of_dash_inductor() -> None:
    listed = [name for names in block(PAGE, "imports") for name in names]
    used = {name for names in GUARD.foreign("dash_inductor").values() for name in names}
    fitting = {name: [room for room in listed if name == room or name.startswith(f"{room}.")] for name in used}
    assert sorted(name for name, rooms in fitting.items() if not rooms) == []
    assert sorted(set(listed) - {room for rooms in fitting.values() for room in rooms}) == []


def test_dash_inductor_imports_nothing_of_it() -> None:
    assert CORE.foreign("dash_guard") == {}
    mentions = [path for path in CORE.modules.values() if re.search(r"import_module\(.dash_guard", path.read_text())]
    assert mentions == []
