"""Names of torch's internals and of triton that the sources of the package use, found by reading them.

A name that a module of `upstream/` passes on is used where it is imported from there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from ..support.distribution import ROOT

_FOLDERS = ("dash_inductor", "kernels", "lowering", "guard/dash_guard")
_TEXTS = ("kernels/portable/templates.py", "dash_inductor/schedule/codegen.py")
"""Files that hold Triton code as text."""
_UPSTREAM = (ROOT / "dash_inductor/upstream", ROOT / "guard/dash_guard/upstream")


def names_used() -> dict[str, set[str]]:
    """Dotted name -> files.  Of torch only names with a leading underscore somewhere, of triton all."""
    found: dict[str, set[str]] = {}
    passed_on = _passed_on()
    files = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py")]
    for path in [*files, *ROOT.glob("_dash_inductor_*.py"), ROOT / "guard/_dash_guard_autoload.py"]:
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8")
        names = set(_names(ast.parse(text), passed_on, is_upstream=not set(_UPSTREAM).isdisjoint(path.parents)))
        if name in _TEXTS:
            names |= {f"triton.language.{used}" for used in re.findall(r"\btl\.(\w+(?:\.\w+)*)", text)}
        for used in names:
            if used.startswith("triton.") or re.search(r"\._", used):
                found.setdefault(used, set()).add(name)
    return found


def _passed_on() -> dict[str, str]:
    """``module.name`` of `upstream/` -> the dotted name of what it stands for, if that is of torch or triton."""
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for room in _UPSTREAM for path in room.glob("*.py")}
    return {
        f"{module}.{name}": path for module, tree in trees.items() for name, path in _imported(tree.body, {}).items()
    }


def _imported(nodes: Iterable[ast.AST], passed_on: dict[str, str]) -> dict[str, str]:
    """Names in a file, and the dotted names of torch and triton that they stand for."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and (used := re.search(r"(?:^|\.)upstream\.(\w+)$", node.module or "")):
            names = {alias.asname or alias.name: f"{used[1]}.{alias.name}" for alias in node.names}
            found |= {name: passed_on[path] for name, path in names.items() if path in passed_on}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: path for name, path in found.items() if path.split(".")[0] in ("torch", "triton")}


def _public(tree: ast.Module) -> frozenset[str]:
    """The names in a module's ``__all__``."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    lists = [ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == "__all__"]
    return frozenset(name for names in lists for name in names)


def _names(tree: ast.Module, passed_on: dict[str, str], *, is_upstream: bool) -> Iterator[str]:
    """The imports from torch and triton, and attribute chains on them; without ``__names__`` at their end."""
    imported = _imported(ast.walk(tree), passed_on)
    public = _public(tree) if is_upstream else frozenset()
    yield from (path for name, path in imported.items() if name not in public)
    modules = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level and node.module in ("upstream", None)
        for alias in node.names
    }
    for node in ast.walk(tree):
        chain: list[str] = []
        part: ast.expr | ast.AST = node
        while isinstance(part, ast.Attribute):
            chain.append(part.attr)
            part = part.value
        if not chain or not isinstance(part, ast.Name):
            continue
        first, *rest = reversed(chain)
        path = imported.get(part.id) or passed_on.get(f"{modules.get(part.id)}.{first}")
        if path is not None:
            attributes = [first, *rest] if part.id in imported else rest
            yield re.sub(r"(\.__\w+__)+$", "", ".".join([path, *attributes]))
