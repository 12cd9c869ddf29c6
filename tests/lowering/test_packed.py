"""Packed operators in compiled graphs on sm_90: tables once for all layers, and no copy of a head."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from .test_data_masks import PROGRAM as BASE
from .test_data_masks import compiled_cases

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
    return compiled_cases(PROGRAM, CASES)


@pytest.mark.parametrize("name", [name for name, _ in CASES])
def test_layers_share_rows_and_tables(name: str, compiled: dict[str, Any]) -> None:
    case, mask = compiled[name], "causal & segments(0,1):varlen(2,3)"
    assert [(status, mask, forward) for status, _, mask, forward in case["sites"]] == [("replaced", mask, "hopper")] * 2
    targets = [target for target, _ in case["nodes"]]
    assert not [target for target in targets if "varlen" in target]
    assert (targets.count("aten.bucketize.Tensor"), targets.count("dash_inductor.mask_tables.default")) == (2, 1)
    (code,) = case["codes"]
    assert code.count("torch.ops.dash_inductor.document_tiles.direct(") == 1
    assert code.count("torch.ops.dash_inductor.mask_tables.direct(") <= 1  # the backward alone reads them
    assert code.count("torch.ops.dash_inductor.attention_forward.direct(") == 2
    body = code.split("def call(", 1)[1]
    assert "bucketize" not in body  # of ATen, which would be a kernel of its own
    assert "cumsum" not in body
    kernels = 3 if torch.__version__.startswith("2.11.") else 5
    # A sum over documents, two kernels around it, one for the numbers of rows, and one for row blocks.  Torch 2.11
    # makes one of the first three.
    assert len(re.findall(r"\.run\(", _until_forward(body))) == kernels
    assert ".item()" not in body


@pytest.mark.parametrize("name", [name for name, _ in CASES])
def test_no_query_key_value_or_output_is_copied(name: str, compiled: dict[str, Any]) -> None:
    """In front of the second forward there is what reads the output of the first one, and no copy."""
    (code,) = compiled[name]["codes"]
    between = code.split("def call(", 1)[1].split("attention_forward.direct(", 2)[1]
    assert len(re.findall(r"\.run\(", between)) == 1  # the residual sum


def _until_forward(code: str) -> str:
    return code.split("attention_forward.direct(", 1)[0]


@pytest.mark.parametrize("name", [name for name, _ in CASES])
def test_no_tensor_of_all_pairs_remains(name: str, compiled: dict[str, Any]) -> None:
    """Numbers of tiles are quotients where they are symbolic."""
    dynamic = "dynamic" in name
    for target, shapes in compiled[name]["nodes"]:
        for shape in shapes:
            lengths = [n for n in shape if ("s" in n and "//" not in n if dynamic else n in ("1000", "2048"))]
            assert len(lengths) < 2, (target, shape)
