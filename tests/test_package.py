"""Wheel, sdist and editable install hold the same package, and it works in a fresh environment."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest
import sympy
import torch
import triton
from packaging.specifiers import SpecifierSet

import dash_guard.version
import dash_inductor
from dash_inductor.upstream import compat

from .support.distribution import ROOT, build_wheel, copy_sources, pip
from .support.processes import run_python


def source_modules() -> set[str]:
    """Every module of the source tree, by its file in an installation."""
    folders = {ROOT / "dash_inductor": "dash_inductor"}
    folders |= {ROOT / name: f"dash_inductor/{name}" for name in ("lowering", "kernels")}
    files = {f"{name}/{path.relative_to(folder)}" for folder, name in folders.items() for path in folder.rglob("*.py")}
    return files | {"_dash_inductor_autoload.py", "_dash_inductor_state.py", "dash_inductor/py.typed"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    source = copy_sources(folder / "source")
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(folder)], cwd=source, check=True, capture_output=True)
    (result,) = folder.glob("*.tar.gz")
    return result


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_has_every_module_and_nothing_else(wheel: Path) -> None:
    assert content(wheel).keys() == source_modules() | {n for n in content(wheel) if n.endswith((".json", ".jinja"))}
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith(("licenses/LICENSE", "dist-info/LICENSE")) for name in archive.namelist())


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the source distribution unpacks to."""
    target = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(target)
    (folder,) = target.iterdir()
    return folder


def test_wheel_of_the_sdist_is_the_same(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(unpacked, tmp_path / "source")  # building leaves something there
    assert content(build_wheel(copy, tmp_path)) == content(wheel)


def test_sdist_is_the_source_tree(unpacked: Path, tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    found = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    assert files <= found
    assert {path.parts[0] for path in found - files} <= {"PKG-INFO", "setup.cfg", "dash_inductor.egg-info"}
    for script in ("tools/setup.sh", "tools/lock.sh", ".ci/run"):
        assert os.access(unpacked / script, os.X_OK)


def test_commands_of_the_readme_work_from_the_sdist(unpacked: Path) -> None:
    """Make knows both targets and finds all files; the demo and the tests are what they run, found and importable."""

    # Variables that an outer `make test TORCH=...` hands to its children would change what the inner one prints.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment = {name: value for name, value in environment.items() if name not in ("MFLAGS", "TORCH", "PYTHON")}

    def run(*command: str) -> str:
        result = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    for target, runs in (("demo", "-m examples.demo"), ("test", "-m pytest")):
        commands = run("make", "--dry-run", target)
        assert commands.startswith("tools/setup.sh .venv torch2.13\n")
        assert runs in commands.splitlines()[-1]
    for version in compat.TESTED:
        commands = run("make", "--dry-run", "test", f"TORCH={version}")
        (lock,) = re.findall(r"^tools/setup\.sh \S+ (\S+)$", commands, re.MULTILINE)
        assert f"\ntorch=={version}." in (unpacked / "requirements" / f"{lock}.txt").read_text()
    run(sys.executable, "-c", "import examples.demo")
    collected = run(sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/test_package.py")
    assert "tests/test_package.py::test_commands_of_the_readme_work_from_the_sdist" in collected


def test_wheels_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """The environment is empty but for both wheels; torch and what it needs come from this process's environment."""
    of_guard = build_wheel(copy_sources(tmp_path / "source") / "guard", tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    pip("--python", python, "install", "-q", "--no-index", "--no-deps", wheel, of_guard)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    places = {sysconfig.get_path("purelib"), *(str(Path(m.__file__).parents[1]) for m in (torch, triton, sympy))}
    (site / "torch.pth").write_text("\n".join(sorted(places)) + "\n")
    program = """
        import sys
        import torch
        import torch.nn.functional as F

        torch.use_deterministic_algorithms(True)
        q = torch.randn(1, 2, 32, 16, requires_grad=True)
        torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))(q).sum().backward()
        assert not any(name.startswith("dash_guard") for name in sys.modules)
        import dash_guard
        import dash_inductor
        import dash_inductor.kernels
        import dash_inductor.lowering

        for module in (dash_guard, dash_inductor, dash_inductor.kernels, dash_inductor.lowering):
            assert module.__file__.startswith(sys.prefix), module.__file__
        assert callable(dash_guard.guard)
        print(*(site.status for site in dash_inductor.sites()))
    """
    result = run_python(
        program,
        python=python,
        DASH_INDUCTOR_CPU="reference",
        DASH_INDUCTOR_STRICT="1",
        TORCHINDUCTOR_FORCE_DISABLE_CACHES="1",
    )
    assert result.stdout.strip() == "replaced"


def test_editable_install_maps_the_folders() -> None:
    program = """
        import dash_inductor, dash_inductor.kernels, dash_inductor.lowering
        for module in (dash_inductor, dash_inductor.kernels, dash_inductor.lowering):
            print(module.__path__[0])
    """
    found = [Path(line) for line in run_python(program).stdout.splitlines()]
    assert found == [ROOT / name for name in ("dash_inductor", "kernels", "lowering")]


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("torch.backends", "dash_inductor"),
        ("torch_dynamo_backends", "dash"),
        ("torch.backends", "dash_guard"),
        ("dash_inductor.doctor", "repeat"),
        ("dash_inductor.training", "guard"),
        ("dash_inductor.training", "record"),
    ],
)
def test_entry_points(group: str, name: str) -> None:
    (entry_point,) = (e for e in entry_points(group=group) if e.name == name)
    assert callable(entry_point.load())


def test_base_dependencies() -> None:
    base = [requirement for requirement in requires("dash-inductor") or [] if "extra ==" not in requirement]
    assert sorted(re.split(r"[<>= ]", r)[0] for r in base) == ["numpy", "sympy", "torch", "triton"]
    version = re.compile(r"\d+\.\d+\.\d+")
    assert version.fullmatch(dash_inductor.__version__)
    assert dash_guard.version.__version__ == dash_inductor.__version__


def test_dependencies_allow_the_tested_versions_and_no_other() -> None:
    """The tested versions of torch, and the versions of triton that these ask for."""
    needed = [requirement for requirement in requires("dash-inductor") or [] if "extra ==" not in requirement]
    base = {re.split(r"[<>= ]", r)[0]: SpecifierSet(re.sub(r"^[\w-]+", "", r)) for r in needed}
    files = sorted((ROOT / "requirements").glob("torch*.in"))
    pinned = [dict(re.findall(r"^(torch|triton)==(\S+)$", file.read_text(), re.MULTILINE)) for file in files]
    assert sorted(pins["torch"].rpartition(".")[0] for pins in pinned) == sorted(compat.TESTED)
    for name in ("torch", "triton"):
        minors = sorted({int(pins[name].split(".")[1]) for pins in pinned})
        major = pinned[0][name].split(".")[0]
        allowed = [n for n in range(100) if base[name].contains(f"{major}.{n}.0")]
        assert allowed == list(range(minors[0], minors[-1] + 1))


def test_metadata(wheel: Path, sdist: Path) -> None:
    """A package index shows an SPDX licence, where the project lives, its extras, and links that work on its page."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra") or []) == {"guard", "metrics", "pictures", "completion"}
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL") or [])
    assert urls.keys() == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(urls["Source"]) for url in urls.values())
    readme = str(metadata.get_payload())
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert links
    pages = f"{urls['Source']}/blob/main/"
    for url in (*links, urls["Documentation"], urls["Changelog"]):
        assert url.startswith(pages)
        assert (ROOT / url.removeprefix(pages).removesuffix("?raw=true")).exists(), url


@pytest.mark.parametrize("module", ["_dash_inductor_autoload", "dash_inductor._switch", "dash_inductor.config"])
def test_what_runs_during_the_import_of_torch_needs_the_standard_library_only(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    foreign = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert {name.split(".")[0] for name in foreign} <= {
        "_dash_inductor_autoload",
        "_dash_inductor_state",
        "dash_inductor",
    }


PAGES = ROOT / "docs" / "api.md", ROOT / "guard" / "docs" / "guard-api.md"
NAMES = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)]
HELD = {
    "dash_inductor.records.records": ("format_table", "SiteRecord", "GraphRecord"),
    "dash_inductor.explanations.explanation": ("Explanation",),
    "dash_inductor.explanations.explained": ("SiteExplanation",),
    "dash_inductor.planning.planner": ("plan",),
    "dash_inductor.model.site": ("Site",),
    "dash_inductor.model.attention_spec": ("AttentionSpec",),
    "dash_inductor.model.mask": ("Mask", "Band"),
    "dash_inductor.model.plan": ("Plan",),
}
"""Names that programs import from these modules, wherever they are defined."""


@pytest.mark.parametrize("module", HELD)
def test_names_of_the_api_stay_where_programs_import_them_from(module: str) -> None:
    found = importlib.import_module(module)
    for name in HELD[module]:
        assert hasattr(found, name)
        assert f"{module}.{name}" in NAMES


def test_every_name_of_the_api_page_exists() -> None:
    """Modules of integrations are read and not imported, because the packages that they join may be missing."""
    for name in NAMES:
        module, _, last = name.rpartition(".")
        if module.startswith("dash_inductor.integrations."):
            source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
            assert last in {getattr(node, "name", "") for node in ast.parse(source).body}, name
            continue
        found = importlib.import_module(module)
        assert hasattr(found, last) or importlib.util.find_spec(name) is not None, name
