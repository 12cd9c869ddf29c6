"""Dropout in a compiled graph on CUDA: one draw per site, and a kernel that reads the seed."""

from __future__ import annotations

import re

import pytest

from ..support.fakecuda import compiler
from .test_forward import compiled, without_comments
from .test_hopper import PROGRAM

DROPPED = PROGRAM.replace("is_causal=True", "is_causal=True, dropout_p=0.1")


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
@pytest.mark.parametrize(
    ("dtype", "kernel", "launch"),
    [
        ("float32", "portable/two_pass/", r"triton_tem_\w+\.run\((.*?)\)"),
        (
            "bfloat16",
            "hopper/bent_fold/",
            r"torch\.ops\.dash_inductor\.attention_forward\.direct\(.*\[(\w+)\], 'causal/.*dropout=0.1,0/",
        ),
    ],
)
def test_the_forward_draws_a_seed_and_saves_it(dtype: str, kernel: str, launch: str) -> None:
    plan, code = compiled(DROPPED.replace("bfloat16", dtype))
    assert plan.startswith(kernel)
    body = without_comments(code).split("def call(", 1)[1]
    assert ("torch.ops.dash_inductor" in body) == (dtype == "bfloat16")
    assert len(re.findall(r"aten\.randint\.low_out\(-9223372036854775808, 9223372036854775807, \[1\], out=", body)) == 1
    (seed,) = re.findall(r"triton_poi_\w+\.run\((\w+), 0, 1, stream", body)  # what was drawn, in its place
    (arguments,) = re.findall(launch, body)
    (results,) = re.findall(r"return \((.*reinterpret_tensor.*)\)", body)
    assert seed in arguments
    assert f" {seed}," in results
    if dtype == "bfloat16":
        return
    assert "THRESHOLD : tl.constexpr = 6554" in code
    assert code.count("return tl.philox(") == 1
