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

CALL = "causal & segments(0,0)/scale=0.125/orders=0213"
PLAN = "Plan('portable', 'two_pass', 'portable', TILES, TILES, section=4, forward_tiles=TILES)"
PROGRAM = (
    BASE.replace("F.scaled_dot_product_attention(q, k, v, is_causal=True)", "attended(q, k, v, ids)[0]")
    .replace("def attend(x, w):", "def attend(x, w, ids):")
    .replace("torch.compile(attend)(x, w)", "torch.compile(attend)(x, w, torch.empty(2, 1024, dtype=torch.int64))")
    .replace("requires_grad=True", "requires_grad=False")
    .replace("    (site,) = dash_inductor.sites()\n", "")
    .replace("str(site.plan), codes, compiled", "codes")
    .replace(
        "    class Compiled(",
        f"""    from dash_inductor import lowering, ops
    from dash_inductor.model import Plan, Tiles

    lowering.register()
    TILES = Tiles(64, 32, 4, 1)
    plan = str({PLAN})

    def attended(q, k, v, ids):
        return ops.attention_forward(q, k, v, [ids], "{CALL}", plan, "test")

    class Compiled(""",
    )
)


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_templates_and_no_plane() -> None:
    """The ids are read by a template and by the kernel that finds the keys of which there are rows; no pair is kept."""
    output = run_python(PROGRAM, path=Path(__file__).parents[1], TORCHINDUCTOR_COMPILE_THREADS=1).stdout
    (code,) = json.loads(output.splitlines()[-1])[0]
    code = without_comments(code)
    assert "torch.ops.dash" not in code
    assert code.count("= attend_tile(") == 1
    assert "HAS_SEGMENTS : tl.constexpr = True" in code
    sizes = re.findall(r"empty_strided_cuda\(\((.*?)\), \(", code)
    assert "2, 1, 1024" in sizes
    assert not [size for size in sizes if size.count("1024") > 1], sizes
