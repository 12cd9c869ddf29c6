"""Names of torch's internals and of triton that the sources of the package use, found by reading them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .distribution import ROOT

_FOLDERS = ("dash_inductor", "kernels", "lowering")
_TEXTS = ("kernels/portable/templates.py", "dash_inductor/schedule/codegen.py")
"""Files that hold Triton code as text."""


def names_used() -> dict[str, set[str]]:
    """Dotted name -> files.  Of torch only names with a leading underscore somewhere, of triton all."""
    found: dict[str, set[str]] = {}
    files = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py")]
    for path in [*files, *ROOT.glob("_dash_inductor_*.py")]:
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8")
        names = set(_names(ast.parse(text)))
        if name in _TEXTS:
            names |= {f"triton.language.{used}" for used in re.findall(r"\btl\.(\w+(?:\.\w+)*)", text)}
        for used in names:
            if used.startswith("triton.") or re.search(r"\._", used):
                found.setdefault(used, set()).add(name)
    return found


def _names(tree: ast.Module) -> Iterator[str]:
    """The imports from torch and triton, and attribute chains on them; without ``__names__`` at their end."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    imported = {name: path for name, path in imported.items() if path.split(".")[0] in ("torch", "triton")}
    yield from imported.values()
    for node in ast.walk(tree):
        chain: list[str] = []
        part: ast.expr | ast.AST = node
        while isinstance(part, ast.Attribute):
            chain.append(part.attr)
            part = part.value
        if chain and isinstance(part, ast.Name) and part.id in imported:
            yield re.sub(r"(\.__\w+__)+$", "", ".".join([imported[part.id], *reversed(chain)]))
