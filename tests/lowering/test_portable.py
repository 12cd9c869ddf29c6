"""A portable plan in a compiled graph: Triton templates with options of their own."""

from __future__ import annotations

import json
import re

import pytest

from ..support.fakecuda import compiler
from ..support.forks import FAKE_GPU, run_forked
from .test_hopper import PROGRAM


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
@pytest.mark.parametrize(("schedule", "kernels"), [("two_pass", 2), ("shift", 2)])
def test_no_template_takes_its_options_from_the_environment(schedule: str, kernels: int) -> None:
    """`shift` has a delta kernel and an ordered one, which is launched cooperatively.

    The forward is not replaced: without CUDA, code with a template of ours cannot be loaded, and the backward comes
        second.
    """
    program = PROGRAM.replace("is_causal=True", "is_causal=False").replace("torch.bfloat16", "torch.float32")
    program = program.replace(".transpose(1, 2).reshape(b, s, e)", "")  # of which the graph would return a copy
    settings = f"config.schedule, config.forward = {schedule!r}, 'keep'"
    program = program.replace("    codes, compiled = [], []\n", f"    {settings}\n    codes, compiled = [], []\n")
    output = run_forked(FAKE_GPU, program, TRITON_DEFAULT_FP_FUSION="0").stdout
    plan, codes, compiled = json.loads(output.splitlines()[-1])
    assert plan.startswith(f"portable/{schedule}/")
    assert not compiled
    templates = re.findall(r"@triton_heuristics\.template\((.*?)\n\)", codes[1], re.DOTALL)
    assert len(templates) == kernels
    assert all("'enable_fp_fusion': True" in template for template in templates)
    assert sum("'launch_cooperative_grid': True" in template for template in templates) == (schedule == "shift")
