"""The private names of torch and triton that a source file mentions, read from its syntax."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_ROOTS = ("torch", "triton")
_INTERNAL = ("triton.backends", "triton.compiler", "triton.knobs", "triton.runtime", "triton.tools")
_DOTTED = re.compile(r"(torch|triton)(\.\w+)+")


def private_names(source: str) -> list[tuple[int, str]]:
    """Line and dotted name of each private name that a file imports, reaches from an import or has as a string.

    A name is private if a part of it begins with one underscore, or if it lies in a package of triton that is not its
    language.  Names of operators below `torch.ops` are the vocabulary of graphs, and no private names.
    """
    tree = ast.parse(source)
    names = dict(_imports(tree))
    found = {(line, name) for line, name in _mentioned(tree, names) if _is_private(name)}
    return sorted((line, name) for line, name in found if not _is_start_of_another(line, name, found))


def _is_private(name: str) -> bool:
    if name.startswith("torch.ops."):
        return False
    parts = name.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return hidden or any(name == package or name.startswith(f"{package}.") for package in _INTERNAL)


def _is_start_of_another(line: int, name: str, found: set[tuple[int, str]]) -> bool:
    return any(other_line == line and other.startswith(f"{name}.") for other_line, other in found)


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names of the file that stand for something of torch or triton, and the dotted names of what they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in _ROOTS:
                    root = alias.name.split(".")[0]
                    yield (alias.asname, alias.name) if alias.asname else (root, root)
        elif isinstance(node, ast.ImportFrom) and _is_of_a_root(node):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _is_of_a_root(node: ast.ImportFrom) -> bool:
    return node.level == 0 and node.module is not None and node.module.split(".")[0] in _ROOTS


def _mentioned(tree: ast.AST, names: dict[str, str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in _ROOTS:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and _is_of_a_root(node):
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            dotted = _dotted(node)
            root, _, rest = dotted.partition(".")
            if root in names:
                yield node.lineno, f"{names[root]}.{rest}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            yield node.lineno, node.value


def _dotted(node: ast.expr) -> str:
    """The text of an attribute of a name, "" of any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""
