"""The portable kernels with dense masks and biases in Triton's interpreter, through Inductor."""

from __future__ import annotations

import pytest

from ...support.cases import cases_of_this_run, some
from ...support.forks import interpreted_results

# Schedule, band, q_len, kv_len, group, dtype, scale, as `PairedAttention.random` has them: dense, bias, keys, and drops
# where probabilities are dropped; behind drops, the head dim of values where it is another one.
EXACT = [
    "two_pass,causal,40,50,2,float32,0.3,bhqk,none,-",
    "ascending,band(-9;9):bottom_right,33,45,1,float32,0.3,qk,none,keys",
    "spt,causal,40,40,2,float32,-0.3,none,bhqk:random,keys",
    "two_pass,band(0;20),33,50,1,float32,0.3,hqk,bqk:infinite,keys",
    "two_pass,full,40,33,1,float16,0.2,qk,hqk:random,-",
    "ascending,full,33,40,1,float16,0.2,none,1:lowest,-,0.25",
    "two_pass,full,33,40,1,float32,0.3,none,hqk:infinite,-",
    "two_pass,causal,40,50,2,float32,0.3,bhqk,none,-,0.3",
    "two_pass,causal,40,80,2,float32,0.3,none,bhqk:random,-",
    "two_pass,full,33,40,1,float32,-0.3,bq,none,keys",
    "spt,full,40,33,2,float32,0.3,hqk,none,-",
    "two_pass,full,40,33,1,float32,0.3,bk,none,-",
    "two_pass,full,33,33,2,float32,0.3,none,qk:lowest,-",
    "ascending,full,32,48,1,float32,0.0,none,bk:lowest,-",
    "spt,full,40,33,1,float32,0.3,none,hqk:random,-,0.1",
    "two_pass,band(0;20),33,50,2,float32,0.3,hqk,bqk:infinite,keys,0.5",
    "two_pass,band(-30;-20),40,90,1,float32,0.3,none,hqk:random,-",
    "two_pass,causal,33,40,2,float32,0.3,none,hqk:random,keys,0,40",
    "spt,full,33,40,1,float32,0.3,none,qk:random,-,0.2,16",
]
POISON = [
    "two_pass,causal,33,40,2,float32,0.3,bhqk,none,-",
    "spt,full,40,33,2,float32,0.3,qk,none,keys",
    "ascending,full,33,33,1,float32,0.3,hqk,hqk:infinite,-",
    "two_pass,band(0;9),40,33,1,float32,0.3,none,bhqk:random,keys",
    "spt,full,33,40,2,float32,0.3,bhqk,hqk:infinite,keys,0.3",
    "two_pass,full,33,40,2,float32,0.3,bhqk,hqk:infinite,keys,0.3",
]
DYNAMIC = [
    "two_pass,causal:bottom_right,33,45,2,float32,0.3,bqk,none,keys",
    "two_pass,full,64,32,1,float32,0.3,hqk,k:infinite,-",
    "spt,full,40,33,1,float32,0.3,none,hqk:random,-",
    "two_pass,causal,33,45,1,float32,0.3,hqk,qk:random,-,0.3",
    "two_pass,causal,33,45,1,float32,0.3,none,hqk:random,keys",
]
ONE = ["two_pass,full,33,40,1,float32,0.3,bhqk,hqk:random,-", "spt,causal,33,33,2,float32,0.3,qk,bqk:infinite,keys"]
COMPUTED = ["two_pass,full,33,40,2,float32,0.3,bqk,none,keys", "spt,causal,33,33,1,float32,0.3,qk,hqk:random,-,0.2"]
WAYS = [
    "two_pass,full,33,40,1,float32,0.3,none,hqk:infinite,-",
    "two_pass,band(-5;9),40,70,1,float32,0.3,none,qk:lowest,-,0.3",
]
MODES = {
    "test_against_fp64": "exact",
    "test_what_nobody_sees_may_hold_anything": "poison",
    "test_static_and_dynamic_lengths_have_the_same_bits": "dynamic",
    "test_operands_that_the_graph_computes": "computed",
    "test_a_batch_element_alone_has_the_same_bits": "one",
    "test_both_ways_to_a_bias_gradient_have_the_same_bits": "ways",
}
"""The mode in which the program runs for each test."""


# against fp64: fp32 keeps 24 bits; in float16 p, ds and the results are rounded to 11
TOLERANCE = {"float32": 2e-5, "float16": 1e-2}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, str]:
    """Results by mode and case, of all tests that are run."""
    cases = cases_of_this_run(request, MODES)
    return dict(zip(cases, interpreted_results("pairs", *cases), strict=True))


@some(EXACT, [EXACT[1], EXACT[4], EXACT[-2]])
def test_against_fp64(results: dict[str, str], case: str) -> None:
    """Output and gradients, the bias's too; rows without keys and keys without rows give zeros."""
    result = results[f"exact,{case}"]
    assert not result.startswith("failed"), result
    assert max(map(float, result.split())) < TOLERANCE[case.split(",")[5]], result


@some(POISON, POISON[:1])
def test_what_nobody_sees_may_hold_anything(results: dict[str, str], case: str) -> None:
    assert results[f"poison,{case}"] == "unharmed"


@some(DYNAMIC, DYNAMIC[:1])
def test_static_and_dynamic_lengths_have_the_same_bits(results: dict[str, str], case: str) -> None:
    assert results[f"dynamic,{case}"] == "equal"


@some(COMPUTED, COMPUTED[:1])
def test_operands_that_the_graph_computes(results: dict[str, str], case: str) -> None:
    """Some operands have other strides than rows one after the other."""
    assert results[f"computed,{case}"] == "equal"


@some(ONE, ONE[:1])
def test_a_batch_element_alone_has_the_same_bits(results: dict[str, str], case: str) -> None:
    assert results[f"one,{case}"] == "equal"


@some(WAYS, WAYS[:1])
def test_both_ways_to_a_bias_gradient_have_the_same_bits(results: dict[str, str], case: str) -> None:
    """By the dq kernel, whose sums over batch elements or heads are in memory, and by a kernel of its own."""
    assert results[f"ways,{case}"] == "equal"
