"""The portable forward in Triton's interpreter, alone and through Inductor, and the backward of masks that are data."""

from __future__ import annotations

import pytest

from ...support.cases import cases_of_this_run, some
from ...support.forks import interpreted_results

# Mask, q_len, kv_len, head dims of q and k and of v, group, dtype, scale, which keys are valid.  Tiles are 32 x 16, so
# every kind of tile is there: full, cut by a bound, by the length, by a key that is not valid, and without any pair.
EXACT = [
    "full,40,70,24,24,1,float32,0.3,all",
    "full,1,33,16,16,2,float32,-0.3,all",
    "full,33,1,24,16,1,float32,0.3,all",
    "causal,64,48,64,32,1,float32,0.3,all",
    "causal,48,64,24,40,2,float16,0.2,holes",
    "causal:bottom_right,70,33,24,24,2,float16,0.2,padded",
    "causal:bottom_right,33,70,24,24,1,float32,-0.3,left",
    "band(-9;9),70,45,16,24,2,float32,0.3,nobody",
    "band(0;20),33,70,192,128,1,float32,0.07,holes",
    "band(none;-5),40,70,8,8,1,float32,0.0,all",
    "band(10;25),70,33,24,24,1,float32,2.5,holes",
    "band(-30;-20):bottom_right,33,70,24,24,1,float32,0.3,all",
    "band(500;600),33,40,24,24,1,float32,0.3,all",
    "full,40,70,24,24,2,float32,0.0,holes",
]
# The same, and the documents of the segments.
SEGMENTS = [
    "causal,70,70,24,24,1,float32,0.3,all,sorted",
    "full,40,70,24,24,2,float16,-0.3,all,repeated",
    "causal:bottom_right,33,70,24,16,1,float32,0.3,holes,repeated",
    "band(0;20),70,45,24,24,2,float32,0.3,all,single",
    "full,33,33,16,16,1,float32,0.3,nobody,single",
    "band(-9;9),70,33,24,24,1,float32,0.3,all,apart",
    "full,33,40,24,24,2,float32,0.0,left,apart",
    "causal,64,48,64,32,1,float32,0.3,all,same",
    "band(500;600),33,40,24,24,1,float32,0.3,all,sorted",
]
POISON = [
    "causal,20,48,24,24,2,float32,0.3,all",
    "band(0;9),64,33,24,40,1,float32,-0.3,padded",
    "full,33,40,24,24,1,float16,0.3,nobody",
    "band(-30;-20),20,70,24,24,1,float32,0.3,left",
    "full,33,40,24,24,1,float32,0.3,all,apart",
    "causal,40,33,24,24,2,float32,-0.3,holes,repeated",
    "causal:bottom_right,48,20,24,24,1,float32,0.0,holes",
    "band(0;9),48,64,24,24,1,float32,0.3,all,single",
    "causal:bottom_right,48,20,24,24,1,float32,0.3,all,sorted",
]
EVEN = ["full,64,48,16,16,1,float32,0.3,all", "causal,64,48,24,24,1,float32,0.3,padded"]
BITS = [*EVEN, "band(-9;9):bottom_right,40,50,24,40,2,float16,0.3,all"]
BITS += ["causal,40,50,24,24,2,float16,0.3,all,apart", "full,40,33,24,16,2,float16,-0.3,holes"]
BITS += ["full,33,33,24,24,1,float32,0.3,holes,sorted"]
INDUCTOR = [
    "causal,64,48,16,24,2,float32,0.3,holes",
    "full,64,32,24,24,1,float32,0.3,all",
    "band(-9;9):bottom_right,40,70,24,24,1,float16,-0.3,holes,apart",
    "band(-9;9):bottom_right,40,70,24,24,1,float16,-0.3,all",
    "causal,64,64,24,24,2,float32,0.3,all,sorted",
]
# Head dims that are no multiples of 8, in forward and backward: rows that begin anywhere, columns past the last one.
# (The interpreter has no products of bfloat16.)
ANY_DIM = [
    "full,40,70,4,4,1,float32,0.3,all",
    "causal,40,33,20,36,2,float16,0.3,all",
    "causal:bottom_right,33,70,36,20,2,float16,0.2,padded",
    "band(-9;9),70,45,33,17,1,float32,0.3,holes",
    "band(0;20),45,70,1,3,2,float16,-0.3,all",
    "causal,45,45,7,12,2,float16,0.3,all,sorted",
    "full,33,40,100,60,1,float32,0.1,holes,apart",
]
SCHEDULES = ["two_pass", "spt:dynamic", "two_pass", "ascending", "spt", "two_pass:dynamic", "two_pass"]
EXACT += ANY_DIM
BITS += [ANY_DIM[1], ANY_DIM[3], ANY_DIM[5]]
POISON += [ANY_DIM[2], ANY_DIM[6]]
INDUCTOR += [ANY_DIM[2], ANY_DIM[4], ANY_DIM[5]]
# Value wider than key, and wide heads.
WIDE = [
    "causal,40,50,64,128,2,float32,0.1,all",
    "full,33,40,192,128,1,float16,0.07,holes",
    "band(-9;9),40,33,20,300,1,float16,0.1,all,apart",
    "causal,33,40,512,300,1,float16,0.04,holes",
]
EXACT += WIDE
DOCUMENT = "causal,45,45,24,24,2,float32,0.3,all,same"
CHUNKS = "causal,40,40,24,24,2,float32,0.3,all"
BACKWARD = [
    "two_pass,band(0;20),40,50,24,24,2,float32,0.3,holes",
    "spt,causal:bottom_right,40,33,24,24,1,float32,0.3,left",
    "bent_fold,full,32,64,24,24,2,float32,0.3,nobody",
    "two_pass,causal,70,70,24,24,1,float32,0.3,all,sorted",
    "two_pass:dynamic,causal:bottom_right,40,33,24,24,2,float32,0.3,holes,repeated",
    "ascending:dynamic,full,40,33,24,24,1,float32,0.3,all,apart",
    "two_pass,causal,40,40,24,24,1,float32,-0.3,left",
    "two_pass,full,32,48,24,24,1,float32,0.3,nobody",
    "two_pass,full,40,50,24,24,2,float32,0.3,all,apart",
    "spt,band(0;20),33,50,24,24,2,float32,-0.3,all,single",
    "bent_fold,causal,40,40,24,24,1,float32,0.3,left,repeated",
    *(f"{schedule},{case}" for schedule, case in zip(SCHEDULES, ANY_DIM, strict=True)),
    *(f"{schedule},{case}" for schedule, case in zip(SCHEDULES[2:6], WIDE, strict=True)),
]
MODES = {
    "test_against_fp64": "exact",
    "test_what_nobody_sees_may_hold_anything": "poison",
    "test_the_bits_of_a_head_are_its_own": "bits",
    "test_static_and_dynamic_lengths_have_the_same_bits": "inductor",
    "test_ids_that_the_graph_computes": "chunks",
    "test_a_document_has_the_same_bits_wherever_it_lies": "documents",
    "test_the_backward_reads_what_takes_part": "backward",
}
"""The mode in which the program runs for each test."""
# against fp64: fp32 keeps 24 bits; p is rounded to 11 before it meets v, and out once more
TOLERANCE = {"float32": 2e-5, "float16": 4e-3}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, str]:
    """Results by mode and case, of all tests that are run."""
    cases = [case.removeprefix("backward,") for case in cases_of_this_run(request, MODES)]
    return dict(zip(cases, interpreted_results("forward", *cases), strict=True))


@some([*EXACT, *SEGMENTS], [*EXACT[1::4], *ANY_DIM[::2], *SEGMENTS[::3]])
def test_against_fp64(results: dict[str, str], case: str) -> None:
    """Rows that see no key give zeros and a log-sum-exp of -inf; that is checked there."""
    result = results[f"exact,{case}"]
    assert not result.startswith("failed"), result
    out, lse = map(float, result.split())
    assert out < TOLERANCE[case.split(",")[6]], result
    assert lse < 2e-5, result


@some(POISON, POISON[:4:3])
def test_what_nobody_sees_may_hold_anything(results: dict[str, str], case: str) -> None:
    """Rows without keys, keys without rows or not valid, also for want of a partner, and memory past the lengths."""
    assert results[f"poison,{case}"] == "unharmed"


@some(BITS, BITS[:1])
def test_the_bits_of_a_head_are_its_own(results: dict[str, str], case: str) -> None:
    """Alone, in another batch, with other strides; where tiles fill the lengths, also if that is not known."""
    assert results[f"bits,{case}"] == ("equal, with nothing known of lengths too" if case in EVEN else "equal")


@some(INDUCTOR, INDUCTOR[2:3])
def test_static_and_dynamic_lengths_have_the_same_bits(results: dict[str, str], case: str) -> None:
    assert results[f"inductor,{case}"] == "equal"


@pytest.mark.parametrize("case", [CHUNKS])
def test_ids_that_the_graph_computes(results: dict[str, str], case: str) -> None:
    """Ids of chunks: one vector for queries and keys, expanded over the batch."""
    assert results[f"chunks,{case}"] == "equal"


@pytest.mark.parametrize("case", [DOCUMENT])
def test_a_document_has_the_same_bits_wherever_it_lies(results: dict[str, str], case: str) -> None:
    """The same in forward and backward, as the first document and as the last."""
    assert results[f"documents,{case}"] == "equal"


@some(BACKWARD, [*BACKWARD[1:5:3], *BACKWARD[-10::3]])
def test_the_backward_reads_what_takes_part(results: dict[str, str], case: str) -> None:
    """Against autograd; keys that no row sees and rows that are left without keys have gradients of zero."""
    result = results[case]
    assert not result.startswith("failed"), result
    assert max(map(float, result.split())) < TOLERANCE[case.split(",")[7]], result
