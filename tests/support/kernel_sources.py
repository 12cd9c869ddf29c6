"""Digests of everything that ends up in the text of a kernel.

``python -m tests.support.kernel_sources > tests/golden/kernel_sources.json`` writes them down.  Before you do that,
raise `planning.numerics.NUMERICS_VERSION` if the change can change a bit of a result.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import tokenize

from dash_inductor.planning import numerics

from .distribution import ROOT

HOST = {
    "registry.py", "standalone.py", "launch.py", "strides.py", "schedule_functions.py", "mask_tables.py",
    "mask_data.py", "data.py", "arguments.py", "call_profiles.py", "family.py", "families.py", "execution.py",
    "calibration.py", "prediction.py", "launching.py", "layouts.py", "prepared.py",
}  # fmt: skip
"""Modules of kernels of which nothing runs on a device."""


def sources() -> dict[str, str]:
    """SHA-256 (hex) by file, of the code without comments, docstrings, imports and blank lines."""
    folders = ROOT / "kernels", ROOT / "dash_inductor/passes/ops/kernels"
    files = [path for folder in folders for path in sorted(folder.rglob("*.py")) if path.name not in HOST]
    names = "codegen.py", "geometry.py", "schedules.py", "symbols.py", "table_tile_schedule.py", "visibility.py"
    files += [ROOT / "dash_inductor/schedule" / name for name in names]
    files.append(ROOT / "dash_inductor/model/relations.py")  # whose tests are pasted
    return {
        str(path.relative_to(ROOT)): hashlib.sha256(code(path.read_text(encoding="utf-8")).encode()).hexdigest()
        for path in files
    }


def code(text: str) -> str:
    """The lines of a module that Python would run, without imports: where a name comes from changes no kernel."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt)
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


if __name__ == "__main__":
    print(json.dumps({"numerics_version": numerics.NUMERICS_VERSION, "sources": sources()}, indent=1))
