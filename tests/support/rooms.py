"""The modules of a package, what they import, and the list of rooms in which imports go one way."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path


def block(page: Path, name: str) -> list[list[str]]:
    """A list of a page: a line for each room, which begins with what the room holds."""
    text = page.read_text(encoding="utf-8")
    (found,) = re.findall(rf"<!-- {name} -->\n.*?```text\n(.*?)```", text, flags=re.DOTALL)
    return [line.split("  ")[0].split(", ") for line in found.splitlines()]


def room_of(module: str, rooms: Sequence[Sequence[str]]) -> int:
    """The room with the longest name that the module's name begins with."""
    names = {name.replace("/", "."): number for number, room in enumerate(rooms) for name in room}
    fitting = [name for name in names if module == name or module.startswith(f"{name}.")]
    assert fitting, f"{module} is in no room"
    return names[max(fitting, key=len)]


@dataclass(frozen=True, eq=False)
class Package:
    """The sources of a package.

    Attributes:
        name: the package.
        folders: the folders of its sources, and which part of the package each of them is.
        beside: modules of the distribution that are not in the package.
    """

    name: str
    folders: Mapping[Path, str]
    beside: tuple[Path, ...] = ()

    @functools.cached_property
    def modules(self) -> dict[str, Path]:
        """Files by the names of the modules, without the name of the package; "" is the package itself."""
        found = {path.stem: path for path in self.beside}
        for folder, prefix in self.folders.items():
            for path in folder.rglob("*.py"):
                parts = [prefix, *path.relative_to(folder).with_suffix("").parts]
                found[".".join(filter(None, parts)).removesuffix("__init__").rstrip(".")] = path
        return found

    @functools.cached_property
    def graph(self) -> dict[str, set[str]]:
        """The modules of the package that each of its modules imports."""
        return {name: self.imports(name, path) for name, path in self.modules.items() if name}

    def imports(self, name: str, path: Path) -> set[str]:
        """The modules of the package that a file imports: at its top, in functions, or for types."""
        own = (self.name, *(beside.stem for beside in self.beside))
        return {self._short(full) for full in self._named(name, path) if full.split(".")[0] in own} - {name}

    def foreign(self, other: str) -> dict[str, set[str]]:
        """What modules import of another package: names of modules, or of what is in them."""
        found = {
            name: {
                full.removeprefix(f"{other}.")
                for full in self._named(name, path)
                if full == other or full.startswith(f"{other}.")
            }
            for name, path in self.modules.items()
        }
        return {name: names for name, names in found.items() if names}

    def against(self, rooms: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
        """The imports that go against the order of the rooms."""
        return [
            (module, name)
            for module, names in self.graph.items()
            for name in names
            if name and room_of(name, rooms) > room_of(module, rooms)
        ]

    def _named(self, name: str, path: Path) -> set[str]:
        inside = path.name == "__init__.py"
        package = ".".join(filter(None, (self.name, *name.split(".")[: None if inside else -1])))
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = resolve_name("." * node.level + (node.module or ""), package) if node.level else str(node.module)
                is_own = base.split(".")[0] == self.name
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    found.add(base if is_own and self._short(full) not in self.modules else full)
        return found

    def _short(self, name: str) -> str:
        return "" if name == self.name else name.removeprefix(f"{self.name}.")
