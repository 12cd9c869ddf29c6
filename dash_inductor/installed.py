"""Tells installed packages from the user's own code by the folders that they are in."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from pathlib import Path


def is_installed(file: str) -> bool:
    """Return whether a file is in a folder of installed packages.

    These are the folders of this interpreter and its user, and others on `sys.path` that have metadata of
    distributions, with and without symbolic links.
    """
    return file.startswith(_folders(tuple(map(str, sys.path))))


@functools.cache
def _folders(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders, each with a slash at its end."""
    folders = [*map(sysconfig.get_path, ("purelib", "platlib")), *site.getsitepackages(), site.getusersitepackages()]
    folders += [entry for entry in path if any(Path(entry).glob("*.dist-info"))]
    found = map(os.path.abspath, folders)
    return tuple({os.path.join(form, "") for folder in found for form in (folder, os.path.realpath(folder))})
