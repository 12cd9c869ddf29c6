"""The generated code: Python form, C semantics, and the Triton source in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_inductor.errors import ArgumentError
from dash_inductor.model.mask import Band
from dash_inductor.schedule.codegen import SIGNATURES, TILE_SCHEDULE, triton_source
from dash_inductor.schedule.schedules import NAMES, PARTS, supports
from dash_inductor.schedule.tile_schedule import Problem, functions
from tests.support.processes import run_python
from tests.support.schedules import c_functions, names_for, problems

from ..support.distribution import ROOT

_PROGRAM = ROOT / "tests" / "interpreted" / "schedules.py"


@settings(max_examples=60)
@given(problems(max_tiles=10), st.data())
def test_c_semantics_give_the_same_values(p: Problem, data: st.DataObject) -> None:
    """No division ever sees a negative operand, in branches that are not taken either."""
    name = data.draw(st.sampled_from(names_for(p)))
    here, there, tail = functions(name, p), c_functions(name, p), p.tail()

    def same(function: str, *args: int) -> None:
        assert getattr(here, function)(*args) == getattr(there, function)(*args)

    ctas_per_head = here.dash_ctas_per_head(*tail)
    for work_id in range(p.batch * p.heads * ctas_per_head):
        same("dash_launch", work_id, p.batch * p.heads, *tail, p.head_chunk)
    for cta_index, part in product(range(ctas_per_head), range(PARTS[name])):
        same("dash_kv_tile", cta_index, part, *tail)
        kv = here.dash_kv_tile(cta_index, part, *tail)
        same("dash_visits", kv, *tail)
        same("dash_q_range", kv, *tail)
        for step in range(here.dash_visits(kv, *tail)):
            same("dash_q_tile", kv, step, *tail)
            same("dash_rank", here.dash_q_tile(kv, step, *tail), kv, *tail)
    for q in range(p.n_q):
        same("dash_kv_range", q, *tail)
    same("dash_resident", p.batch * p.heads, *tail, p.head_chunk)


@pytest.mark.parametrize("name", NAMES)
def test_absent_bounds_are_never_read(name: str) -> None:
    """An absent bound is found neither by name nor by place; if the band has it, the same look finds it."""
    for band in (Band(), Band(0, None), Band(None, 3), Band(-4, 9)):
        if supports(name, band) is None:
            words = set(re.findall(r"tile_schedule\[\d\]|\w+", triton_source(name, band)))
            for place, member in enumerate(TILE_SCHEDULE):
                there = getattr(band, member) is not None if member in ("lo", "hi") else True
                assert (member in words) == (f"tile_schedule[{place}]" in words) == there, (band, member)


def test_signatures_are_fixed() -> None:
    source = triton_source("bent_fold", Band(0, None))
    for name, parameters in SIGNATURES.items():
        spelled = ", ".join(f"{p}: tl.constexpr" if p.isupper() else p for p in parameters)
        assert f"@triton.jit\ndef {name}({spelled}):\n" in source


def test_source_of_an_unsupported_mask_is_refused() -> None:
    with pytest.raises(ArgumentError, match="shift needs the full mask"):
        triton_source("shift", Band(0, None))


def test_source_is_the_same_in_every_process() -> None:
    """It enters Inductor's cache keys; a hash seed must not show."""
    code = (
        "import hashlib; from dash_inductor.model import Band;"
        "from dash_inductor.schedule import NAMES, supports, triton_source;"
        "bands = [Band(), Band(0, None), Band(0, 5), Band(None, 1)];"
        "text = ''.join(triton_source(n, b) for n in NAMES for b in bands if supports(n, b) is None);"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    assert len({run_python(code, PYTHONHASHSEED=seed).stdout for seed in "12"}) == 1


def test_package_needs_neither_torch_nor_triton() -> None:
    code = (
        "import sys; import dash_inductor.schedule, dash_inductor.model; assert 'sympy' not in sys.modules;"
        "from dash_inductor.schedule import *; assert tables and triton_source;"
        "from dash_inductor.planning import plan;"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_triton_source_agrees_with_python_in_the_interpreter(tmp_path: Path) -> None:
    """Every function of every schedule, for full, lower, upper and two-sided bands, over vectors of cases."""
    cases = 0
    for name, band in product(NAMES, (Band(), Band(0, None), Band(None, 3), Band(-4, 9))):
        if supports(name, band) is None:
            (tmp_path / f"case{cases}.py").write_text(
                "import triton\nimport triton.language as tl\n\n"
                f"NAME, LO, HI = {name!r}, {band.lo}, {band.hi}\n\n\n" + triton_source(name, band)
            )
            cases += 1
    env = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, str(_PROGRAM), str(tmp_path)], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split() == ["compared", str(cases)]
