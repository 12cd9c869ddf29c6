"""What compiled graphs on sm_90 make of packed operators: tables once for all layers, and no copy of a head."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .support.fakecuda import compiler
from .support.processes import run_python
from .test_lowering_data_masks import PROGRAM as BASE

MODEL = """
    from torch.nn.attention.varlen import varlen_attn
    from tests.support.packed import GROUPED

    def layer(x, w, starts):
        t, e = x.shape
        q = (x @ w[0]).view(t, 8, 64)
        k, v = ((x @ w[i][:, :128]).view(t, 2, 64) for i in (1, 2))
        out = varlen_attn(q, k, v, starts, starts, t, t, window_size=(-1, 0), **GROUPED)
        return x + out.reshape(t, e)

    def model(x, ws, starts):
        for w in ws:
            x = layer(x, w, starts)
        return x

"""
CASES = [("static", False), ("dynamic", True)]
_HEAD, _REST = BASE.split("    def layer(")
PROGRAM = _HEAD + MODEL.lstrip("\n") + "    found = {}" + _REST.split("    found = {}")[1]
for _old, _new in (
    ("for name, packed, dynamic in CASES", "for name, dynamic in CASES"),
    ("torch.empty(2, 1000, 512,", "torch.empty(1000, 512,"),
    ("data = torch.zeros(2, 1000, dtype=torch.int64)", "data = torch.zeros(9, dtype=torch.int32)"),
    ("mark_dynamic(t, 1)", "mark_dynamic(t, 0)"),
    ("(x, ws, data, packed)", "(x, ws, data)"),
):
    assert PROGRAM.count(_old) == 1, _old
    PROGRAM = PROGRAM.replace(_old, _new)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    if compiler() is None:
        pytest.skip("the fake CUDA device needs a C++ compiler")
    program = PROGRAM.replace("CASES", repr(CASES))
    output = run_python(program, path=Path(__file__).parents[1], TORCHINDUCTOR_COMPILE_THREADS=1).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", [name for name, _ in CASES])
def test_layers_share_numbers_of_documents_and_tables(name: str, compiled: dict[str, Any]) -> None:
    case = compiled[name]
    assert [(status, mask, forward) for status, _, mask, forward in case["sites"]] == [
        ("replaced", "causal & segments(0,0)", "hopper")
    ] * 2
    targets = [target for target, _ in case["nodes"]]
    assert not [target for target in targets if "varlen" in target]
    assert (targets.count("aten.bucketize.Tensor"), targets.count("dash.mask_tables.default")) == (1, 1)
    (code,) = case["codes"]
    assert code.count("torch.ops.dash.mask_tables.default(") == 1
    assert code.count("torch.ops.dash.attention_forward.default(") == 2
    body = code.split("def call(", 1)[1]
    assert "bucketize" not in body  # of ATen, which would be a kernel of its own
    before = body.split("torch.ops.dash.mask_tables", 1)[0]
    assert len(re.findall(r"\.run\(", before)) == 1  # all that gives the numbers in one kernel
    assert ".item()" not in body


@pytest.mark.parametrize("name", [name for name, _ in CASES])
def test_no_tensor_of_all_pairs_remains(name: str, compiled: dict[str, Any]) -> None:
    tokens = "1000" if name == "static" else "s"
    for target, shapes in compiled[name]["nodes"]:
        for shape in shapes:
            assert sum(size.startswith(tokens) for size in shape) < 2, (target, shape)
