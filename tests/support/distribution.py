"""Build the distribution from a copy of the source tree, and install it where a test can break it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NOT_SOURCES = (".[!c]*", "build", "dist", "*.egg-info", "__pycache__", "torch_compile_debug")


def copy_sources(target: Path) -> Path:
    """A copy of the source tree, so that building leaves nothing in the real one."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*_NOT_SOURCES))
    return target


def pip(*args: str | Path) -> None:
    """Run pip of this environment without a registry."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def build_wheel(source: Path, target: Path) -> Path:
    """The wheel of a source tree or sdist of dash_inductor or of dash_guard."""
    before = set(target.glob("*.whl"))
    pip("wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", target, source)
    (wheel,) = set(target.glob("*.whl")) - before
    return wheel


def install_wheel(wheel: Path, target: Path) -> Path:
    """The wheel's content in a directory of its own; on PYTHONPATH it wins over an installed dash_inductor."""
    pip("install", "-q", "--no-index", "--no-deps", "--target", target, wheel)
    return target
