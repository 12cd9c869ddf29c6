"""Wheel, sdist and editable install hold the same package, and it works in a fresh environment."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest

import dash_inductor

from .support.distribution import ROOT, build_wheel, copy_sources, pip
from .support.processes import run_python


def source_modules() -> set[str]:
    """Every module of the source tree, by its file in an installation."""
    folders = {ROOT / "dash_inductor": "dash_inductor"}
    folders |= {ROOT / name: f"dash_inductor/{name}" for name in ("lowering", "kernels")}
    files = {f"{name}/{path.relative_to(folder)}" for folder, name in folders.items() for path in folder.rglob("*.py")}
    return files | {"_dash_inductor_autoload.py", "dash_inductor/py.typed"}


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


def test_wheel_of_the_sdist_is_the_same(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert content(build_wheel(folder, tmp_path)) == content(wheel)


def test_wheel_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """The environment is empty but for this wheel; torch and what it needs come from this process's environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    pip("--python", python, "install", "-q", "--no-index", "--no-deps", wheel)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    program = """
        import sys
        import torch
        import torch.nn.functional as F

        torch.use_deterministic_algorithms(True)
        q = torch.randn(1, 2, 32, 16, requires_grad=True)
        torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))(q).sum().backward()
        import dash_inductor
        import dash_inductor.kernels
        import dash_inductor.lowering

        for module in (dash_inductor, dash_inductor.kernels, dash_inductor.lowering):
            assert module.__file__.startswith(sys.prefix), module.__file__
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


@pytest.mark.parametrize(("group", "name"), [("torch.backends", "dash_inductor"), ("torch_dynamo_backends", "dash")])
def test_entry_points(group: str, name: str) -> None:
    (entry_point,) = (e for e in entry_points(group=group) if e.name == name)
    assert callable(entry_point.load())


def test_base_dependencies() -> None:
    base = [r for r in requires("dash-inductor") or [] if "extra ==" not in r]
    assert sorted(re.split(r"[<>= ]", r)[0] for r in base) == ["sympy", "torch", "triton"]
    version = re.compile(r"\d+\.\d+\.\d+")
    assert version.fullmatch(dash_inductor.__version__)


@pytest.mark.parametrize("module", ["_dash_inductor_autoload", "dash_inductor._switch", "dash_inductor.config"])
def test_what_runs_during_the_import_of_torch_needs_the_standard_library_only(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    foreign = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert foreign <= {"_dash_inductor_autoload", "dash_inductor"}
