"""`import torch` arms a hook and nothing else; nothing in the package, however broken, reaches the user's program."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ..support.processes import run_python, run_python_unchecked

STATE = """
import sys

def state():
    passes = getattr(sys.modules.get("torch._inductor.fx_passes.joint_graph"), "pass_patterns", [])
    installed = sum(getattr(p, "pass_name", "") == "dash_inductor" for p in passes)
    armed = any(type(f).__module__ == "_dash_inductor_autoload" for f in sys.meta_path)
    return {"armed": armed, "installed": installed, "package": "dash_inductor" in sys.modules}
"""


def test_nothing_is_imported_before_the_user_compiles() -> None:
    run_python(
        STATE
        + """
import torch, importlib.util
assert "torch._inductor" not in sys.modules and "sympy" not in sys.modules
assert state() == {"armed": True, "installed": 0, "package": False}, state()
importlib.util.find_spec("torch._inductor.compile_fx")  # looking for the module is not importing it
assert state()["armed"]
import torch._inductor.compile_fx
assert state() == {"armed": False, "installed": 1, "package": True}, state()
assert "dash_inductor.lowering" not in sys.modules and "dash_inductor.passes.all" not in sys.modules
import dash_inductor
assert state()["installed"] == 1 and dash_inductor.is_enabled()
"""
    )


def test_environment_switches_all_off() -> None:
    run_python(
        STATE
        + """
import torch, warnings
import torch._inductor.compile_fx
from torch._inductor.codecache import FxGraphHashDetails
assert state() == {"armed": False, "installed": 0, "package": False}, state()
import dash_inductor
assert state()["installed"] == 0 and not hasattr(FxGraphHashDetails.__init__, "__wrapped__")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    dash_inductor.enable()
assert "DASH_INDUCTOR=0" in str(caught[0].message)
assert not dash_inductor.is_enabled()
""",
        DASH_INDUCTOR="0",
    )


@pytest.mark.parametrize("first", ["torch._inductor.compile_fx", "dash_inductor"])
def test_import_of_the_package_where_torch_loads_no_extensions(first: str) -> None:
    second = "dash_inductor" if first != "dash_inductor" else "torch._inductor.compile_fx"
    run_python(
        STATE
        + f"""
import {first}
assert state()["installed"] == 0
assert "{first}" != "dash_inductor" or "torch" not in sys.modules
import {second}
assert state() == {{"armed": False, "installed": 1, "package": True}}, state()
""",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_logs_option_imports_the_package_during_the_import_of_torch() -> None:
    run_python("import torch, sys; assert 'dash_inductor' in sys.modules", TORCH_LOGS="+dash_inductor")


# Importing Inductor runs the hook; compiling under determinism loads the rest (a product of matrices needs no C++
# compiler).  HOOK is what both come to, without the seconds that importing Inductor takes.
HOOK = "import _dash_inductor_autoload; _dash_inductor_autoload._install()\n"
IMPORT = "import torch, torch._inductor.compile_fx; assert torch.ones(1).item() == 1\n"
COMPILE = """
import torch
torch.use_deterministic_algorithms(True)
assert torch.compile(lambda x: x @ x)(torch.ones(2, 2)).sum().item() == 8
"""

BROKEN = {
    "at import": ("dash_inductor/__init__.py", "raise RuntimeError('broken on purpose')", IMPORT),
    "no Python": ("dash_inductor/__init__.py", "broken on purpose", HOOK),
    "exit": ("dash_inductor/__init__.py", "raise SystemExit('broken on purpose')", HOOK),
    "at hook time": ("dash_inductor/install/installation.py", "raise RuntimeError('broken on purpose')", HOOK),
    "at install time": (
        "dash_inductor/install/installation.py",
        "def install(): raise RuntimeError('broken on purpose')",
        COMPILE,
    ),
    "at first use": ("dash_inductor/lowering/__init__.py", "raise RuntimeError('broken on purpose')", COMPILE),
}


def break_package(site: Path, case: str) -> str:
    """Break the copy in `site`; returns the program that meets it."""
    file, content, program = BROKEN[case]
    (site / file).write_text(content + "\n")
    return program


def assert_one_warning(result: CompletedProcess[str], reason: str) -> None:
    assert result.stderr.count("dash_inductor is inactive") == 1, result.stderr
    assert reason in result.stderr


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_is_one_warning(case: str, copied_package: Path) -> None:
    program = break_package(copied_package, case)
    result = run_python(program, path=copied_package)
    assert_one_warning(result, "SyntaxError" if case == "no Python" else "broken on purpose")


def test_a_broken_package_where_warnings_are_errors(copied_package: Path) -> None:
    break_package(copied_package, "at import")
    result = run_python("import warnings; warnings.simplefilter('error')\n" + HOOK, path=copied_package)
    assert_one_warning(result, "broken on purpose")


def test_strict_raises_what_is_broken(copied_package: Path) -> None:
    program = break_package(copied_package, "at first use")
    result = run_python_unchecked(program, path=copied_package, DASH_INDUCTOR_STRICT="1")
    assert result.returncode == 1
    assert "RuntimeError: broken on purpose" in result.stderr


def test_a_malformed_switch_is_one_warning() -> None:
    program = "import _dash_inductor_autoload as a; a.autoload(); a.autoload()"
    result = run_python(program, DASH_INDUCTOR="maybe")
    assert_one_warning(result, "DASH_INDUCTOR='maybe' is not allowed: expected one of '0', '1', 'false', 'true', 'no'")


def test_the_switch_takes_every_spelling() -> None:
    program = """
import os
import _dash_inductor_state as state
for text, on in state.BOOLEANS.items():
    for spelling in (text, text.upper()):
        os.environ["DASH_INDUCTOR"] = spelling
        assert state.off_by_environment() is not on, spelling
os.environ["DASH_INDUCTOR"] = ""
assert not state.off_by_environment()
"""
    run_python(program)


def test_a_malformed_setting_is_one_warning() -> None:
    result = run_python(IMPORT, DASH_INDUCTOR_CPU="yes")
    assert_one_warning(result, "DASH_INDUCTOR_CPU='yes' is not allowed: expected one of 'off', 'reference'")


LACKING = """
import torch._inductor.fx_passes.joint_graph as joint_graph
joint_graph.pass_patterns = tuple(joint_graph.pass_patterns)
"""


# Causes that keep dash_inductor from its work, and what the error says then.
INACTIVE: list[tuple[str, dict[str, str], str]] = [
    ("", {"DASH_INDUCTOR_STRICT": "maybe"}, "ArgumentError: DASH_INDUCTOR_STRICT='maybe' is not allowed: expected one"),
    ("", {"DASH_INDUCTOR_STRICT": "yes", "DASH_INDUCTOR_CPU": "fast"}, "DASH_INDUCTOR_CPU='fast' is not allowed"),
    ("", {"DASH_INDUCTOR_STRICT": "on", "DASH_INDUCTOR": "maybe"}, "DASH_INDUCTOR='maybe' is not allowed: expected"),
    (LACKING, {"DASH_INDUCTOR_STRICT": "TRUE"}, "UnsupportedVersionError: torch 2."),
]


@pytest.mark.parametrize(
    ("program", "env", "reason"),
    [pytest.param(*case, marks=[pytest.mark.full] if case is INACTIVE[2] else []) for case in INACTIVE],
)
def test_strict_fails_closed_where_dash_inductor_is_inactive(program: str, env: dict[str, str], reason: str) -> None:
    """The first compile under determinism is an error, and the second one too; without determinism nothing is."""
    rest = """
import torch
function = lambda x: x @ x
for flag in (True, True, False):
    torch.use_deterministic_algorithms(flag)
    torch._dynamo.reset()
    try:
        print(torch.compile(function)(torch.ones(2, 2)).sum().item())
    except Exception as error:
        print(error)
"""
    result = run_python(program + rest, **env)
    text = f"DASH_INDUCTOR_STRICT={env['DASH_INDUCTOR_STRICT']!r} is set, but dash_inductor is inactive. "
    assert result.stdout.count(text) == 2, result.stdout
    assert result.stdout.count(reason) == 2, result.stdout
    assert result.stdout.splitlines()[-1] == "8.0"
    assert "dash_inductor is inactive" not in result.stderr


def test_a_torch_that_lacks_something_is_one_warning() -> None:
    program = LACKING
    result = run_python(program + COMPILE)
    assert_one_warning(result, "UnsupportedVersionError: torch 2.")
    assert "joint_graph.pass_patterns as a list" in result.stderr


def test_modules_that_another_thread_imports_meanwhile() -> None:
    """As the threads of dash_guard do; here it is the garbage collector, which runs at the same places."""
    run_python("""
import gc, sys, types
import _dash_inductor_autoload as autoload
import torch
from dash_inductor.upstream import defects
from torch._inductor.pattern_matcher import PatternExpr

names = [f"imported_meanwhile_{number}" for number in range(1 << 16)]
made = [types.ModuleType(name) for name in names]
gc.callbacks.append(lambda phase, info: sys.modules.setdefault(names.pop(), made.pop()))
count, before = len(names), gc.get_threshold()
gc.set_threshold(1)
assert not autoload._is_defining()
list(defects.registered_attention())
gc.set_threshold(*before)
assert len(names) < count
""")
