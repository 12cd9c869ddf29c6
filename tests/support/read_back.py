"""What a generated kernel reads back without waiting for the threads that have written it."""

from __future__ import annotations

import re
from collections.abc import Iterator

_KERNEL = re.compile(r"def (triton_(?:per|red|poi)_\w+)\(.*?\):\n((?:    .*\n|\n)+)")


def read_back(code: str) -> Iterator[tuple[str, str]]:
    """Name of a kernel, and the pointer that it has stored by in one loop, and loads by behind that without a barrier.

    Args:
        code: that Inductor has generated.
    """
    for name, body in _KERNEL.findall(code):
        written: set[str] = set()
        for part in _parts(body):
            if re.match(r" {4}tl\.debug_barrier\(\)", part):
                written = set()
            if "debug_barrier" not in part:
                yield from ((name, pointer) for pointer in re.findall(r"tl\.load\((\w+)", part) if pointer in written)
            written |= {*re.findall(r"tl\.store\((\w+)", part)} if part.startswith("    for ") else set()


def _parts(body: str) -> list[str]:
    """The statements of a kernel, a loop with all that is in it."""
    return re.findall(r"^ {4}\S.*\n(?: {5,}.*\n|\n)*", body, re.MULTILINE)
