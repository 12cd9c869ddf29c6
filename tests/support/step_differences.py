"""Where processes that should have computed the same have not: in which values first, and in which kernels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

SHOWN = 6
"""Values and kernels that are named for each set of processes."""


def described(found: Mapping[str, Mapping[str, str]], caches: Mapping[str, Path]) -> str:
    """A line for each value and each kernel that differs, "" if none does.

    Args:
        found: digests of values, by their names, of each process, in the order in which they were computed.
        caches: of each process, the folders of Inductor and Triton.
    """
    values = list(_different(found))
    if not values:
        return ""
    kernels = list(_different({process: _kernels(folder) for process, folder in caches.items()}))
    lines = [f"{len(values)} values differ, first of all:", *values[:SHOWN]]
    lines += [f"{len(kernels)} kernels differ:" if kernels else "no kernel differs", *kernels[:SHOWN]]
    return "\n".join(lines)


def _different(of: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Names whose values are not the same in all processes, with who has which."""
    for name in dict.fromkeys(name for values in of.values() for name in values):
        who: dict[str, list[str]] = {}
        for process, values in of.items():
            who.setdefault(values.get(name, "none"), []).append(process)
        if len(who) > 1:
            yield f"  {name}: " + "; ".join(f"{value} in {', '.join(names)}" for value, names in who.items())


def _kernels(folder: Path) -> dict[str, str]:
    """Names of compiled kernels and of configurations that were found by timing, with digests."""
    texts: dict[str, list[str]] = {}
    for path in folder.rglob("*.ptx"):
        instructions = re.sub(r"^\s*\.(?:file|loc)\b.*$", "", path.read_text(), flags=re.MULTILINE)
        texts.setdefault(path.stem, []).append(instructions.split(".section")[0])
    for path in folder.rglob("*.best_config"):
        texts.setdefault(f"{path.stem}, chosen by timing", []).append(path.read_text())
    return {name: hashlib.sha256("".join(sorted(all_)).encode()).hexdigest()[:8] for name, all_ in texts.items()}
