"""What compiled graphs on sm_90 make of packed operators: tables once for all layers, and no copy of a head."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .test_lowering_data_masks import PROGRAM as BASE
from .test_lowering_data_masks import compiled_cases

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
CASES = [
    ("static", False, "packed"),
    ("dynamic", True, "packed"),
    ("aligned", False, "aligned"),
    ("aligned, dynamic", True, "aligned"),
]
_HEAD, _REST = BASE.split("    def layer(")
PROGRAM = _HEAD + MODEL.lstrip("\n") + "    found = {}" + _REST.split("    found = {}")[1]
for _old, _new in (
    ("for name, packed, dynamic in CASES", "for name, dynamic, documents in CASES"),
    ("contextlib.suppress(Exception):", "contextlib.suppress(Exception), config.patch(documents=documents):"),
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


@pytest.mark.parametrize(("name", "documents"), [(name, documents) for name, _, documents in CASES])
def test_layers_share_numbers_of_documents_and_tables(name: str, documents: str, compiled: dict[str, Any]) -> None:
    case, aligned = compiled[name], documents == "aligned"
    mask = "causal & segments(0,0)" + (":aligned" if aligned else "")
    assert [(status, mask, forward) for status, _, mask, forward in case["sites"]] == [("replaced", mask, "hopper")] * 2
    targets = [target for target, _ in case["nodes"]]
    assert not [target for target in targets if "varlen" in target]
    counts = targets.count("aten.bucketize.Tensor"), targets.count("dash.mask_tables.default")
    assert counts == (1 + aligned, 1)
    (code,) = case["codes"]
    assert code.count("torch.ops.dash.mask_tables.default(") == 1
    assert code.count("torch.ops.dash.attention_forward.default(") == 2
    body = code.split("def call(", 1)[1]
    assert "bucketize" not in body  # of ATen, which would be a kernel of its own
    assert "cumsum" not in body
    before = body.split("torch.ops.dash.mask_tables", 1)[0]
    # All that gives the numbers in one kernel; places take a sum over documents, two around it and one on each side.
    assert len(re.findall(r"\.run\(", before)) == (5 if aligned else 1)
    assert ".item()" not in body


@pytest.mark.parametrize("name", [name for name, _, documents in CASES if documents == "aligned"])
def test_copies_of_aligned_documents(name: str, compiled: dict[str, Any]) -> None:
    """Of q alone and of k and v together, in front of a forward; the output is read where it lies."""
    (code,) = compiled[name]["codes"]
    body = code.split("def call(", 1)[1].split("torch.ops.dash.mask_tables", 1)[1]
    first = body.split("attention_forward.default(", 1)[0]
    assert len(re.findall(r"\.run\(", first)) == 2
    behind = body.split("attention_forward.default(", 2)[1].split("extern_kernels.mm(", 1)[0]
    assert len(re.findall(r"\.run\(", behind)) == 1  # with the sum that reads it


@pytest.mark.parametrize("name", [name for name, *_ in CASES])
def test_no_tensor_of_all_pairs_remains(name: str, compiled: dict[str, Any]) -> None:
    """Numbers of tiles are quotients where they are symbolic."""
    dynamic = "dynamic" in name
    for target, shapes in compiled[name]["nodes"]:
        for shape in shapes:
            lengths = [n for n in shape if ("s" in n and "//" not in n if dynamic else n in ("1000", "2024"))]
            assert len(lengths) < 2, (target, shape)
