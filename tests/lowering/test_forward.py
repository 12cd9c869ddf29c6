"""A plan with the portable forward in a compiled graph: one Triton template."""

from __future__ import annotations

import json
import re

import pytest

from ..support.fakecuda import compiler
from ..support.forks import FAKE_GPU, run_forked
from .test_hopper import PROGRAM as HOPPER
from .test_hopper import without_kernels

BASE = without_kernels(HOPPER)
PROGRAM = BASE.replace("torch.bfloat16", "torch.float32")


def compiled(program: str) -> tuple[str, str]:
    """The plan, and the code of the forward graph."""
    output = run_forked(FAKE_GPU, program, TRITON_DEFAULT_FP_FUSION="0").stdout
    plan, codes, _ = json.loads(output.splitlines()[-1])
    return plan, codes[0]


def without_comments(code: str) -> str:
    """Inductor writes the graph, and the places of its caches, into comments."""
    return re.sub(r"#.*", "", code)


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_one_template() -> None:
    plan, code = compiled(PROGRAM)
    assert plan.startswith("portable/two_pass/")
    assert "/forward=portable" in plan
    assert "torch.ops.dash_inductor" not in without_comments(code)
    (template,) = re.findall(r"@triton_heuristics\.template\((.*?)\n\)", code, re.DOTALL)
    assert "'enable_fp_fusion': True" in template
    assert "num_stages=2,\nnum_warps=4," in template
    assert code.count("= attend_tile(") == 1
    programs = 2 * 8 * 1024 // 64  # q tiles of all heads
    assert len(re.findall(rf"triton_tem_\w+\.run\(.*, {programs}, 1, 1, stream=", code)) == 1


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_other_forwards_are_called() -> None:
    """A forward without a template is a call of the operator, with the lowering and without it."""
    plan, code = compiled(BASE)
    assert "/forward=hopper/fwd=192x128w12s4" in plan
    assert "torch.ops.dash_inductor.attention_forward" in without_comments(code)
    line = "forward.register = lambda: None"
    _, fallback = compiled(
        BASE.replace(
            "    class Compiled(",
            f"    from dash_inductor.lowering import forward\n\n    {line}\n\n    class Compiled(",
        )
    )
    assert ".direct(" in without_comments(code)
    plainly = re.sub(r", 'cuda:0 bfloat16 [^']*'\)", ")", without_comments(code)).replace(".direct(", ".default(")
    assert plainly == without_comments(fallback)
