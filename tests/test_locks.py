"""The locks in requirements/: all that is installed has one version and hashes, and the ranges beside them allow it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from dash_inductor.upstream import compat

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
INPUTS = {path.stem: path for path in sorted(FOLDER.glob("*.in")) if path.stem not in ("tools", "integrations")}
TORCH = sorted(name for name in INPUTS if name.startswith("torch"))
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
CUDA = re.compile(r"cuda-|nvidia-")


def asked(path: Path) -> list[Requirement]:
    """The requirements of an input, with the inputs that it includes."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if text.startswith("-r "):
            found += asked(path.parent / text.removeprefix("-r "))
        elif text:
            found.append(Requirement(text))
    return found


def pythons(name: str) -> list[str]:
    """The Pythons for which an input has a lock."""
    oldest = re.search(r"^# Needs Python 3\.(\d+)$", INPUTS[name].read_text(encoding="utf-8"), re.MULTILINE)
    return [python for python in PYTHONS if not oldest or int(python.split(".")[1]) >= int(oldest[1])]


def entries(name: str) -> dict[Requirement, list[str]]:
    """The requirements of a lock, with their hashes; there is no option and no place in it."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            requirement, *hashes = re.split(r"\s+--hash=", line)
            found[Requirement(requirement.strip())] = hashes
    return found


def versions(name: str, python: str) -> dict[str, str]:
    """The versions that a lock installs with a Python on Linux; one version of each package."""
    environment = default_environment() | {"python_version": python, "python_full_version": f"{python}.5"}
    environment |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    found = defaultdict(list)
    for requirement in entries(name):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            (specifier,) = requirement.specifier
            assert specifier.operator == "=="
            found[canonicalize_name(requirement.name)].append(specifier.version)
    assert all(len(several) == 1 for several in found.values())
    return {package: several[0] for package, several in found.items()}


LOCKS = [*INPUTS, *(f"{name}-cuda" for name in TORCH)]


def test_there_is_a_lock_for_every_input_and_no_other() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(LOCKS)
    assert sorted(f"torch{version}" for version in compat.TESTED) == TORCH


@pytest.mark.parametrize("name", LOCKS)
def test_every_entry_has_hashes(name: str) -> None:
    assert entries(name)
    for requirement, hashes in entries(name).items():
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", text) for text in hashes), requirement
        assert requirement.url is None
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert not re.search(r"^\s*-|://|(^|\s)/\w", re.sub(r"--hash=\S+", "", text), re.MULTILINE)


@pytest.mark.parametrize("name", INPUTS)
def test_locked_versions_are_allowed(name: str) -> None:
    """With every Python, and nothing that is asked for is missing.  Else run ``make lock``."""
    assert pythons(name)
    for python in pythons(name):
        locked = versions(name, python)
        for requirement in asked(INPUTS[name]):
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("name", TORCH)
def test_a_cpu_build_needs_nothing_of_cuda(name: str) -> None:
    """The libraries of a CUDA build are in a lock of their own, and nothing else is."""
    for python in pythons(name):
        assert not [package for package in versions(name, python) if CUDA.match(package)]
        assert all(CUDA.match(package) for package in versions(f"{name}-cuda", python))
        assert "nvidia-cublas" in versions(f"{name}-cuda", python)


def test_the_interpreter_of_triton_3_6_has_a_numpy_that_it_can_use() -> None:
    assert all(SpecifierSet("<2.4").contains(versions("torch2.11", python)["numpy"]) for python in PYTHONS)


def test_the_table_of_models_is_made_with_what_is_locked() -> None:
    from .support.model_table import OTHERS, golden

    table = golden()
    locked = versions("torch2.13", "3.11")
    assert table["versions"] == {name: locked[name] for name in ("torch", "transformers")}
    others = [versions(name, "3.11")["transformers"] for name in INPUTS if name.startswith("transformers")]
    assert list(table[OTHERS]) == sorted(others)


@pytest.mark.parametrize("script", ["tools/setup.sh", "tools/lock.sh", "Makefile"])
def test_nothing_is_installed_without_its_lock(script: str) -> None:
    """But for the CPU build of the locked version of torch, this package, and the newest, which is asked for."""
    text = (ROOT / script).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^.*pip install.*$", text, re.MULTILINE)
    others = ("--require-hashes", '"torch==$torch+cpu"', "--no-index", "--no-deps -e .", "--upgrade-strategy eager")
    assert not [command for command in commands if not any(other in command for other in others)]
