"""The tests that `make test-gpu` collects without packages for development: a GPU machine may have no registry."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from ..support.distribution import ROOT

OTHERS = ("expecttest", "hypothesis", "xdist")
TESTS = [path for folder in ("tests", "guard/tests") for path in (ROOT / folder).rglob("test_*.py")]
MARKED = [path for path in TESTS if re.search(r"\bmark\.gpu\b|\bMARKS\b", path.read_text())]
COLLECT = f"""
import sys
sys.modules |= dict.fromkeys({OTHERS})  # importing them fails
import pytest
sys.exit(pytest.main([*sys.argv[1:], "--collect-only", "-q"]))
"""


def test_files_with_gpu_tests_need_no_other_package() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "test-gpu", "PYTHON=python"]
    of_make = "MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "PYTEST_ARGS", "TORCH"  # of a make around this test
    env = {name: value for name, value in os.environ.items() if name not in of_make}
    made = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    python, *arguments = made.stdout.split()
    assert (python, arguments[:4]) == ("python", ["-m", "pytest", "-m", "gpu"])
    collect = [sys.executable, "-c", COLLECT, *arguments[2:]]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(collect, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    files = {line.split("::")[0] for line in ended.stdout.splitlines() if "::" in line}
    assert arguments[4:] == ["tests/gpu", "guard/tests/gpu"]
    assert files == {str(path.relative_to(ROOT)) for path in MARKED}
    assert all("tests/gpu/" in name for name in files)
