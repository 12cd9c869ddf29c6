"""Programs in forks of one process, which has imported everything once: each begins as a fresh process does, without
the seconds that its imports would take.

A program must not depend on variables that its imports have read already, nor on what it finds imported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path
from typing import Any

from .distribution import ROOT
from .processes import LARGE_HEAP, environment_of

SERVE = "\nfrom tests.support.forks import serve\nserve()\n"

FAKE_GPU = """
from tests.support import fakecuda, mockgpu

mockgpu.install_driver()
fakecuda.install()
import torch
import torch._inductor.compile_fx
import torch._inductor.graph

mockgpu.install_torch()
import dash_inductor.lowering
import dash_inductor.passes.all
"""
"""Imports of programs for the fake CUDA device, whose attention is FLASH at first."""

INTERPRETER = """
import os

os.environ["TRITON_INTERPRET"] = "1"
from tests.support.mockgpu import install_driver

install_driver()
import torch
import torch._inductor.compile_fx
import dash_inductor.lowering
from tests.support import quick_interpreter

quick_interpreter.install()
"""
"""Imports of programs in Triton's interpreter, with a GPU for Inductor."""


class _Parent:
    """A process that has run `imports`, and forks for each program."""

    def __init__(self, imports: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import gc; gc.set_threshold{LARGE_HEAP}\n{imports}{SERVE}"],
            env=environment_of(path=ROOT), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        atexit.register(self._process.communicate)  # which ends it

    def run(self, job: dict[str, Any]) -> int:
        """The exit status of a program."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that has imported everything has ended"
        return int(answer)


@functools.cache
def _parent(imports: str) -> _Parent:
    return _Parent(imports)


def run_forked(imports: str, code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `code` after `imports`; it must succeed.

    Args:
        imports: `FAKE_GPU` or `INTERPRETER`.
        code: the program, indented as is convenient.
        args: its command line.
        env: variables on top of those of `environment_of`.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "errors")]
        job = {"code": textwrap.dedent(code), "args": args, "env": env, "files": [*map(str, files)]}
        status = _parent(imports).run(job)
        out, errors = (file.read_text() for file in files)
    assert status == 0, f"exit code {status}\n{out}\n{errors}"
    return subprocess.CompletedProcess(args, status, out, errors)


def interpreted(module: str, *args: str) -> list[str]:
    """The lines that a module of `tests.interpreted` prints when it runs in Triton's interpreter; it must succeed."""
    program = f"import runpy; runpy.run_module('tests.interpreted.{module}', run_name='__main__', alter_sys=True)"
    return run_forked(INTERPRETER, program, *args).stdout.splitlines()


def interpreted_results(module: str, *args: str) -> list[str]:
    """Those of the lines that are marked as results, without the mark."""
    return [line.removeprefix("RESULT ") for line in interpreted(module, *args) if line.startswith("RESULT ")]


def serve() -> None:
    """Run the programs that the standard input names, one after the other, until it ends."""
    gc.freeze()  # no child copies the pages of what has been imported
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _become(job: dict[str, Any]) -> None:
    """Be the process of a program, to its end."""
    for number, file in zip((1, 2), job["files"], strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["-c", *job["args"]]
    os.environ.update(job["env"])
    status = 1
    try:
        exec(compile(job["code"], "<program>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
