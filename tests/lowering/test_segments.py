"""A mask with segments in a compiled graph: the portable templates, and which keys a row sees."""

from __future__ import annotations

import json
import re

import pytest

from ..support.fakecuda import compiler
from ..support.forks import FAKE_GPU, run_forked
from .test_forward import PROGRAM as BASE
from .test_forward import without_comments

CALL = "causal & segments(0,0)/scale=0.125/orders=0213"
PLAN = "Plan('portable', 'two_pass', 'portable', TILES, TILES, head_chunk=4, forward_tiles=TILES)"
PROGRAM = (
    BASE.replace("F.scaled_dot_product_attention(q, k, v, is_causal=True)", "attended(q, k, v, ids)[0]")
    .replace("def attend(x, w):", "def attend(x, w, ids):")
    .replace("torch.compile(attend)(x, w)", "torch.compile(attend)(x, w, torch.empty(2, 1024, dtype=torch.int64))")
    .replace("requires_grad=True", "requires_grad=False")
    .replace("    (site,) = dash_inductor.sites()\n", "")
    .replace("str(site.plan), codes, compiled", "codes")
    .replace(
        "    class Compiled(",
        f"""    from dash_inductor import lowering
    from dash_inductor.operators import attention as ops
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
    output = run_forked(FAKE_GPU, PROGRAM).stdout
    (code,) = json.loads(output.splitlines()[-1])[0]
    code = without_comments(code)
    assert "torch.ops.dash_inductor" not in code
    assert code.count("= attend_tile(") == 1
    assert "Mask(HAS_LO, HAS_HI, HAS_KEYS, True, (equal,), VARLEN_ROWS)" in code
    sizes = re.findall(r"empty_strided_cuda\(\((.*?)\), \(", code)
    assert "2, 1, 1024" in sizes
    assert not [size for size in sizes if size.count("1024") > 1], sizes


TRANSPOSED = """
    import contextlib, json

    import torch
    import torch._inductor.compile_fx
    import torch._inductor.config
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dash_inductor.model import Band
    from tests.support.keyed import KeyedAttention
    from tests.support.portable_plans import portable_plan
    from tests.support.together import Together

    class Compiled(Exception):
        pass

    codes = []

    def save(code):
        codes.append(code)
        raise Compiled  # nothing can be loaded

    GraphLowering.save_output_code = staticmethod(save)
    torch._inductor.config.fx_graph_cache = False
    p = KeyedAttention.random(113, 300, Band(), dims=(64, 64), batch=3, dtype=torch.bfloat16, documents="sorted")
    plan = portable_plan(p.site(), "sm_90", "two_pass")
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(Exception):
        p = p.for_elements(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda"))
        Together([p], [plan])([p])
    print(json.dumps(codes))
"""


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_strides_of_the_vector_of_keys_are_those_that_the_template_has() -> None:
    """Inductor would lay it out as the ids lie, which are transposed here, after the template was written."""
    output = run_forked(FAKE_GPU, TRANSPOSED).stdout
    (code,) = json.loads(output.splitlines()[-1])
    code = without_comments(code)
    (read,) = re.findall(r"Operand\(KEYS, \((\d+), 0, (\d+),\)\)", code)
    (made,) = re.findall(r"empty_strided_cuda\(\(3, 1, 300\), \((\d+), \d+, (\d+)\), torch.int32\)", code)
    assert read == made
