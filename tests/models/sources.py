"""Programs whose sources are in no registry: ``python -m tests.models.sources`` fetches their commits into .programs.

Without a network nothing is fetched, and the command says so.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / ".programs" / "sources"
SOURCES = {
    "flash-attn": ("https://github.com/Dao-AILab/flash-attention", "0251105a2fb19d2957484b7f023cd8c115286ced"),
    "nanoGPT": ("https://github.com/karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"),
    "modded-nanogpt": (
        "https://github.com/KellerJordan/modded-nanogpt",
        "f411b3d346aa52d3504324ca93c230fd84c6c07f",
    ),
    "prime-rl": ("https://github.com/PrimeIntellect-ai/prime-rl", "559b44772e471d1538537b8805cc77f3824a5e64"),
    "nanochat": ("https://github.com/karpathy/nanochat", "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd"),
}
"""Repositories, and the commits that the table of programs is made with."""


def versions() -> dict[str, str]:
    """The first digits of the commits, by name."""
    return {name: commit[:8] for name, (_, commit) in SOURCES.items()}


def module(name: str, path: str) -> ModuleType:
    """A module of a program, with the folder of the program on the path."""
    sys.path.insert(0, str(FOLDER / name))
    return importlib.import_module(path)


def fetched(name: str) -> bool:
    """Whether the commit of a program is there; packages of registries are no matter of this module."""
    if name not in SOURCES:
        return True
    head = FOLDER / name / ".git" / "HEAD"
    return head.exists() and head.read_text(encoding="utf-8").strip() == SOURCES[name][1]


def _git(name: str, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(FOLDER / name), *arguments], check=True, capture_output=True, text=True)


def main() -> None:
    for name, (address, commit) in SOURCES.items():
        if fetched(name):
            continue
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        try:
            _git(name, "init", "--quiet")
            _git(name, "fetch", "--quiet", "--depth", "1", address, commit)
            _git(name, "checkout", "--quiet", commit)
        except subprocess.CalledProcessError as error:
            print(f"{name} is left out, because {address} cannot be fetched: {error.stderr.strip()}", flush=True)


if __name__ == "__main__":
    main()
