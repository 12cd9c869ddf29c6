"""Masks that are data in compiled graphs on sm_90: tables once for all layers, and no mask of all pairs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from ..support.fakecuda import compiler
from ..support.forks import FAKE_GPU, run_forked

PROGRAM = """
    import contextlib, json

    import torch
    import torch._inductor.compile_fx  # installs our pass: what looks at graphs comes after it
    import torch._inductor.config
    import torch.nn.functional as F
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    import dash_inductor
    from dash_inductor.upstream import compat
    from dash_inductor.config import config
    from dash_inductor.lowering import ahead
    from dash_inductor.records.records import clear_sites

    ahead.compile_kernels = lambda *args: None  # budgets have their own tests

    class Compiled(Exception):
        pass

    codes, nodes = [], []

    class Look:
        def apply(self, graph):
            for node in graph.nodes:
                values = node.meta.get("val")
                values = values if isinstance(values, (list, tuple)) else [values]
                shapes = [list(map(str, v.shape)) for v in values if isinstance(v, torch.Tensor)]
                nodes.append([str(node.target), shapes])
            return 0

    compat.joint_passes().append(Look())

    def save(code):
        codes.append(code)
        raise Compiled  # nothing can be loaded

    GraphLowering.save_output_code = staticmethod(save)
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.joint_graph_constant_folding = False  # it computes with real tensors
    torch.use_deterministic_algorithms(True)

    def layer(x, w, mask):
        b, s, e = x.shape
        q = (x @ w[0]).view(b, s, 8, 64).transpose(1, 2)
        k, v = ((x @ w[i][:, :128]).view(b, s, 2, 64).transpose(1, 2).repeat_interleave(4, 1) for i in (1, 2))
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, s, e)

    def model(x, ws, data, packed):
        rows = torch.arange(x.shape[1], device=x.device)
        mask = (rows[:, None] >= rows)[None, None]
        if packed == "first tokens":
            mask = mask & (rows >= data[:, None, :, None])
        else:
            mask = mask & (data[:, None, :, None] == data[:, None, None, :] if packed else data[:, None, None, :] != 0)
        for w in ws:
            x = layer(x, w, mask)
        return x

    found = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), config.patch(strict=True):
        for name, packed, dynamic in CASES:
            codes.clear(), nodes.clear(), clear_sites()
            torch._dynamo.reset()
            x = torch.empty(2, 1000, 512, dtype=torch.bfloat16, requires_grad=True)
            data = torch.zeros(2, 1000, dtype=torch.int64)
            if dynamic:
                for t in (x, data):
                    torch._dynamo.mark_dynamic(t, 1)
            ws = [torch.empty(3, 512, 512, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
            with contextlib.suppress(Exception):
                torch.compile(model, fullgraph=True)(x, ws, data, packed)
            sites = [[s.status, str(s.plan), s.mask, s.forward] for s in dash_inductor.sites()]
            found[name] = {"sites": sites, "nodes": list(nodes), "codes": list(codes)}
    print(json.dumps(found))
"""

CASES = [
    ("padded", False, False),
    ("packed", True, False),
    ("packed, dynamic", True, True),
    ("first tokens", "first tokens", False),
    ("padded, dynamic", False, True),
]


def compiled_cases(program: str, cases: Sequence[object]) -> dict[str, Any]:
    """By name of a case, what `PROGRAM`, or one that was made of it, found of its graphs."""
    if compiler() is None:
        pytest.skip("the fake CUDA device needs a C++ compiler")
    program = program.replace("CASES", repr(cases))
    output = run_forked(FAKE_GPU, program).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return compiled_cases(PROGRAM, CASES)


@pytest.mark.parametrize("name", [name for name, *_ in CASES])
def test_layers_share_the_tables(name: str, compiled: dict[str, Any]) -> None:
    case = compiled[name]
    kind = name.removesuffix(", dynamic")
    component = {"packed": "segments(0,0)", "first tokens": "interval(0,none,none)"}.get(kind, "keys(0)")
    assert [(status, mask, forward) for status, _, mask, forward in case["sites"]] == [
        ("replaced", f"causal & {component}", "hopper")
    ] * 2
    schedule = "bent_fold" if kind == "padded" else "spt"
    assert all(plan.startswith(f"hopper/{schedule}/") for _, plan, *_ in case["sites"])
    targets = [target for target, _ in case["nodes"]]
    assert targets.count("dash_inductor.mask_tables.default") == 1
    lists = int(kind != "padded")  # of documents
    assert targets.count("dash_inductor.document_tiles_of_mask.default") == lists
    assert targets.count("dash_inductor.attention_forward.default") == 2
    assert targets.count("dash_inductor.attention_backward.default") == 2
    (code,) = case["codes"]
    assert code.count("torch.ops.dash_inductor.mask_tables.direct(") == 1
    assert code.count("torch.ops.dash_inductor.document_tiles_of_mask.direct(") == lists
    assert code.count("torch.ops.dash_inductor.attention_forward.direct(") == 2


@pytest.mark.parametrize("name", [name for name, *_ in CASES])
def test_operands_are_not_copied(name: str, compiled: dict[str, Any]) -> None:
    """Rows and keys that take no part may hold anything: kernels see to it."""
    assert not [target for target, _ in compiled[name]["nodes"] if target == "aten.where.self"]


@pytest.mark.parametrize("name", [name for name, *_ in CASES])
def test_no_tensor_of_all_pairs_remains(name: str, compiled: dict[str, Any]) -> None:
    case = compiled[name]
    length = "1000" if "dynamic" not in name else "s"
    for target, shapes in case["nodes"]:
        for shape in shapes:
            assert sum(size.startswith(length) for size in shape) < 2, (target, shape)
