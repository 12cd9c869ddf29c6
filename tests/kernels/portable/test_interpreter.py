"""The source that runs on GPUs, in Triton's interpreter and through Inductor, against fp64."""

from __future__ import annotations

import pytest

from ...support.cases import cases_of_this_run, some
from ...support.forks import interpreted_results

# Every launch-ordered schedule; ragged and unequal lengths, grouped heads, all kinds of bounds, static and dynamic.
CASES = [
    "ascending full 40 70 2 float32 static",
    "descending causal 70 70 1 float32 static",
    "spt band(0,20) 33 70 2 float32 static",
    "bent_fold causal 70 40 1 float16 static",
    "bent_fold causal 1030 40 1 float32 static",  # long enough for tile schedules to be bent
    "spt causal:bottom_right 33 70 1 float32 dynamic",
    "two_pass band(-9,9) 70 33 2 float16 static",
    "two_pass causal:bottom_right 40 33 1 float32 static",
    "two_pass band(0,20) 33 70 2 float32 dynamic",
]
# NaN and infinities past the lengths, in rows that see no key, in keys that no row sees, behind the mask.
HIDDEN = [
    "two_pass causal 20 48 2 float32 poison",
    "two_pass band(0,9) 64 33 1 float32 poison",
    "bent_fold causal:bottom_right 48 20 1 float32 poison",
    "spt band(-30,-20) 20 70 2 float32 poison",
    "ascending band(none,-5) 32 64 1 float32 poison",
    "ascending full 20 40 1 float16 poison",
    "two_pass causal 40 40 1 float32 overflow",
    "spt causal 40 40 2 float32 overflow",
]
RING = "shift full 70 70 1 float32 static"
# against fp64: fp32 keeps 24 bits, fp16 rounds inputs of the last matmul to 11 bits (2**-11 of sums up to about 10)
TOLERANCE = {"float32": 2e-5, "float16": 2e-2}


MODES = {"test_against_fp64": "", "test_what_nobody_sees_may_hold_anything": ""}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, str]:
    """The results of all cases of this run, from one process."""
    cases = [*(case.removeprefix(",") for case in cases_of_this_run(request, MODES)), RING]
    words = [word for case in cases for word in case.split()]
    return dict(zip(cases, interpreted_results("kernels", *words), strict=True))


@some(CASES, [*CASES[4:7], CASES[8]])
def test_against_fp64(results: dict[str, str], case: str) -> None:
    assert max(map(float, results[case].split())) < TOLERANCE[case.split()[5]], results[case]


@some(HIDDEN, HIDDEN[::3])
def test_what_nobody_sees_may_hold_anything(results: dict[str, str], case: str) -> None:
    assert results[case] == "unharmed"


def test_a_schedule_that_waits_for_later_programs_is_caught(results: dict[str, str]) -> None:
    """Programs run one after the other there: in a ring the first one would wait for the last one, for ever."""
    assert results[RING] == "accumulation out of order"
