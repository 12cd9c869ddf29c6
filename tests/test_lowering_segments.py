"""What a compiled graph makes of a mask with segments: the portable templates, and which keys a row sees."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .support.fakecuda import compiler
from .support.processes import run_python
from .test_lowering_forward import PROGRAM as BASE
from .test_lowering_forward import without_comments

MASK = "(ids[:, None, :, None] == ids[:, None, None, :]) & (torch.arange(s) <= torch.arange(s)[:, None])"
PROGRAM = (
    BASE.replace("def attend(x, w):", "def attend(x, w, ids):")
    .replace("is_causal=True", f"attn_mask={MASK}")
    .replace("torch.compile(attend)(x, w)", "torch.compile(attend)(x, w, torch.empty(2, 1024, dtype=torch.int64))")
)


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_templates_and_no_plane() -> None:
    """The ids are read by a template and by the kernel that finds the keys of which there are rows; no pair is kept."""
    output = run_python(
        PROGRAM, path=Path(__file__).parents[1], TORCHINDUCTOR_COMPILE_THREADS=1, DASH_INDUCTOR_SCHEDULE="two_pass"
    ).stdout
    plan, codes, _ = json.loads(output.splitlines()[-1])
    assert plan.startswith("portable/two_pass/")
    assert "/forward=portable" in plan
    code = without_comments(codes[0])
    assert "torch.ops.dash" not in code
    assert code.count("= attend_tile(") == 1
    assert "HAS_SEGMENTS : tl.constexpr = True" in code
    sizes = re.findall(r"empty_strided_cuda\(\((.*?)\), \(", code)
    assert "2, 1024" in sizes
    assert not [size for size in sizes if size.count("1024") > 1], sizes
