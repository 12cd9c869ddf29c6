"""The portable kernels in Triton's interpreter: intervals, bounded scores, sinks, and a gradient of the log-sum-exp."""

from __future__ import annotations

import pytest

from ...support.forks import interpreted_results

CASES = [
    "causal/scale=-0.25/softcap=2.0/bias=0/sinks=1;bh;two_pass;float32",
    "interval(0,none,none)/scale=0.25/softcap=30.0/sinks=1;lh;spt;float16",
    "causal & segments(0,0)/scale=0.25/softcap=2.0/bias=1/grad_logsumexp=2;ibg;spt;float32",
    "dense(0)/scale=0.25/bias=1;db;two_pass;float32",
    "causal & dilated(0,1)/scale=0.25;pe;two_pass;float32",
    "dilated(0,1)/scale=0.25;ne;spt;float32",
    "causal & segments(1,1) & head_interval(0,none)/scale=0.25;Li;two_pass;float32",
    "causal/scale=0.25/slopes=0;s;two_pass;float32",
    "band(-9,30)/scale=0.25/softcap=2.0/slopes=0;S;spt;float32",
]
MORE = [
    "full/scale=0.25/slopes=0;S;two_pass;float16",
    "causal & segments(0,0)/scale=0.25/bias=1/slopes=2/grad_logsumexp=3;ibSg;two_pass;float32",
    "causal/scale=0.25/slopes=0/sinks=1;sr;spt;float32",
    "interval(0,1,none)/scale=0.25;lu;spt;float32",
    "head_interval(0,1)/scale=0.25/sinks=2;LUr;spt;float32",
    "causal & head_interval(none,0)/scale=0.25/bias=1;Ub;two_pass;float16",
    "interval(none,0,0)/scale=0.25/sinks=1;nr;two_pass;float32",
    "interval(0,none,none)/scale=0.25/grad_logsumexp=1;lg;two_pass;float32",
    "causal & interval(0,none,none)/scale=0.25;l;two_pass;float32",
    "band(-5,30) & dilated(0,0)/scale=0.25;e;two_pass;float32",
    "segments(2,2) & interval(3,none,none) & dilated(0,1)/scale=0.25/softcap=2.0;peil;spt;float16",
    "band(-9,30) & segments(0,0) & interval(1,none,none)/scale=-0.3;il;spt;float32",
    "causal/scale=0.25/softcap=2.0;;spt;float32",
    "dense(0)/scale=0.25/bias=1/sinks=2;dbr;spt;float32",
    "causal/scale=0.25/grad_logsumexp=0;g;two_pass;float32",
    "band(-5,30)/scale=0.25/grad_logsumexp=0;g;spt;float32",
    "causal/scale=0.25/grad_logsumexp=0;g;two_pass;float16",
    "causal & segments(0,0)/scale=0.25/bias=1;ib;two_pass;float32",
    "causal & interval(0,none,none)/scale=0.25/softcap=2.0/bias=1;lb;spt;float32",
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.full)], ids=["", "more"])
def test_against_fp64(cases: list[str]) -> None:
    found = interpreted_results("scores", *cases)
    assert len(found) == len(cases)
    for case, line in zip(cases, found, strict=True):
        errors = [float(word) for word in line.removeprefix(case).split()]
        assert len(errors) == (4 if "sinks" not in case or "bias" in case or "slopes" in case else 5)
        assert max(errors) < (5e-2 if case.endswith("16") else 5e-5), line
