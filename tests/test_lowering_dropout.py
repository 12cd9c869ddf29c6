"""What a compiled graph makes of dropout on CUDA: one draw per site, and a template that reads the seed."""

from __future__ import annotations

import re

import pytest

from .support.fakecuda import compiler
from .test_lowering_forward import compiled, without_comments
from .test_lowering_hopper import PROGRAM


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_the_forward_draws_a_seed_and_saves_it() -> None:
    plan, code = compiled(PROGRAM.replace("is_causal=True", "is_causal=True, dropout_p=0.1"))
    assert plan.startswith("portable/two_pass/")
    body = without_comments(code).split("def call(", 1)[1]
    assert "torch.ops.dash" not in body
    (seed,) = re.findall(r"aten\.randint\.low_out\(-9223372036854775808, 9223372036854775807, \[1\], out=(\w+)\)", body)
    (launch,) = re.findall(r"triton_tem_\w+\.run\((.*?)\)", body)
    (results,) = re.findall(r"return \((reinterpret_tensor.*)\)", body)
    assert seed in launch
    assert f" {seed}," in results
    assert "THRESHOLD : tl.constexpr = 6554" in code
    assert code.count("return tl.philox(") == 1
