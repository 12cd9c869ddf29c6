"""Pictures as files: the suffix says which kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ..errors import ArgumentError
from .chrome import chrome
from .image import image
from .model import Picture
from .text import text

SUFFIXES: dict[str, Callable[[Picture], bytes]] = {
    ".svg": lambda picture: image(picture, "svg"),
    ".png": lambda picture: image(picture, "png"),
    ".json": lambda picture: json.dumps(chrome(picture), separators=(",", ":")).encode(),
    ".txt": lambda picture: "\n".join(text(timeline) for timeline in picture.timelines).encode(),
}
"""How a picture becomes a file: two images, a trace for Perfetto and chrome://tracing, text."""


def check_path(path: Path) -> None:
    """Raise ArgumentError unless pictures can have this path: a suffix of `SUFFIXES`, in a folder that exists."""
    if path.suffix not in SUFFIXES:
        raise ArgumentError("timeline", str(path), f"a file name that ends with one of {', '.join(SUFFIXES)}")
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentError("timeline", str(path), "a file name in a folder that exists")


def write(picture: Picture, path: Path) -> None:
    """Write a picture in the format that the path's suffix names.

    Raises:
        ArgumentError: another suffix, a folder that does not exist, or timelines in different units.
        MissingPackageError: an SVG or PNG picture without matplotlib.
    """
    check_path(path)
    path.write_bytes(SUFFIXES[path.suffix](picture))
