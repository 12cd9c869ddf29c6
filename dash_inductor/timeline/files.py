"""Writes pictures of timelines to files; the suffix selects the format."""

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
"""The writers of the formats by suffix: two kinds of images, a trace for Perfetto and chrome://tracing, and text."""


def check_path(path: Path) -> None:
    """Raises ArgumentError unless the path has a suffix of `SUFFIXES` and its folder exists."""
    if path.suffix not in SUFFIXES:
        raise ArgumentError("timeline", str(path), f"a file name that ends with one of {', '.join(SUFFIXES)}")
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentError("timeline", str(path), "a file name in a folder that exists")


def write(picture: Picture, path: Path) -> None:
    """Writes a picture in the format of the path's suffix.

    Raises:
        ArgumentError: another suffix, a folder that does not exist, or timelines in different units.
        MissingPackageError: matplotlib, which SVG and PNG pictures need, is not installed.
    """
    check_path(path)
    path.write_bytes(SUFFIXES[path.suffix](picture))
