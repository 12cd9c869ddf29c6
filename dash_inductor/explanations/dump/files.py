"""Folders and files of a dump: names that nobody else has, and files that appear whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Put `text` at `path` at once: whoever reads the file sees all of it, or what was there before."""
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
    """A folder that did not exist: `name`, made fit for file names, and a number behind it where that is taken."""
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
