"""Writes the files and folders of a dump: unique folder names, and atomic writes."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Writes a file atomically: readers see either the whole new text or the previous file."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def new_folder(parent: Path, name: str) -> Path:
    """Makes a new folder called `name`, adapted for file systems, with a number appended if it already exists."""
    parent.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", name).strip("_") or "_"
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
