"""A Hopper plan in a compiled graph on sm_90: one call of the operator, on the tensors as they lie."""

from __future__ import annotations

import ast
import json
import re

import pytest
import torch._functorch.config

from ..support.fakecuda import compiler
from ..support.forks import FAKE_GPU, run_forked

SDPA = "F.scaled_dot_product_attention(q, k, v, is_causal=True)"
PROGRAM = """
    import contextlib, json

    import torch
    import torch._functorch.config
    import torch._inductor.config
    import torch.nn.functional as F
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    import dash_inductor
    from dash_inductor.config import config
    from dash_inductor.kernels.hopper.backward import build

    class Compiled(Exception):
        pass

    codes, compiled = [], []
    compile = build.compile_kernel

    def record(function, *rest):
        compiled.append(function.__name__)
        return compile(function, *rest)

    build.compile_kernel = record

    def save(code):
        codes.append(code)
        if len(codes) == 2:
            raise Compiled  # nothing can be loaded

    GraphLowering.save_output_code = staticmethod(save)
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.force_non_lazy_backward_lowering = True
    torch.use_deterministic_algorithms(True)

    def attend(x, w):
        b, s, e = x.shape
        q, k, v = (t.transpose(1, 2) for t in (x @ w).view(b, s, 3, 8, e // 8).unbind(2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, e)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), config.patch(strict=True):
        x, w = (torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in ((2, 1024, 512), (512, 1536)))
        with contextlib.suppress(Exception):
            torch.compile(attend)(x, w)
    (site,) = dash_inductor.sites()
    print(json.dumps([str(site.plan), codes, compiled]))
"""


def without_kernels(program: str) -> str:
    """The program, where the kernels that it compiles beside its graphs are not what it is about."""
    line = "from dash_inductor.kernels.hopper.backward import build\n"
    assert line in program
    stubbed = "    from dash_inductor.lowering import ahead\n\n    ahead.compile_kernels = lambda *arguments: None\n"
    return program.replace(line, line + stubbed)


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_operator_reads_interleaved_heads_in_place() -> None:
    program = PROGRAM.replace(".transpose(1, 2).reshape(b, s, e)", "")  # of which the graph would return a copy
    output = run_forked(FAKE_GPU, program).stdout
    plan, codes, compiled = json.loads(output.splitlines()[-1])
    assert plan.startswith("hopper/bent_fold/")
    assert sorted(compiled) == ["finish", "hopper_backward", "prepare"]  # with the graph, not in the first step
    body = codes[1].split("def call(", 1)[1]
    (node,) = (
        node
        for node in ast.walk(ast.parse(codes[1]))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.ops.dash_inductor.attention_backward.direct"
    )
    grad_out, *saved = (ast.unparse(argument) for argument in node.args[:6])
    assert ast.unparse(node.args[8]) == repr(plan)
    # All are inputs of the graph as they are.
    assert grad_out == "tangents_1"
    (inputs,) = re.findall(r"^ *(.+) = args$", body, re.MULTILINE)
    assert set(saved) <= set(inputs.split(", "))
    strides = asserted_strides(codes[1])
    assert [strides[name] for name in saved[:4]] == ["(1572864, 64, 1536, 1)"] * 3 + ["(524288, 64, 512, 1)"]
    as_output = torch._functorch.config.guess_tangent_strides_as_outputs  # not so in torch 2.11
    assert strides[grad_out] == ("(524288, 64, 512, 1)" if as_output else "(524288, 65536, 64, 1)")
    before = body.split("torch.ops.dash_inductor.attention_backward", 1)[0]
    assert not re.search(r"\.run\(|empty_strided|clone|contiguous|copy_\(", before), before


def asserted_strides(code: str) -> dict[str, str]:
    """The strides that a graph's code asserts of its inputs: one by one, or (from 2.14 on) of all in one call."""
    found = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "assert_size_stride":
            found[ast.unparse(node.args[0])] = ast.unparse(node.args[2])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "assert_size_stride_grouped":
            names, _, strides = (group.elts for group in node.args[:3] if isinstance(group, ast.Tuple))
            found |= {ast.unparse(n): ast.unparse(s) for n, s in zip(names, strides, strict=True)}
    return found


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_all_sizes_may_be_dynamic() -> None:
    """Batch, heads and head dimension too, as `dynamic=True` has them; heads and head dimension become numbers."""
    program = without_kernels(PROGRAM)
    program = program.replace("torch.compile(attend)(x, w)", "torch.compile(attend, dynamic=True)(*parts)")
    program = program.replace(
        "def attend(x, w):", "def attend(q, k, v):\n        return " + SDPA + "\n\n    def unused(x, w):"
    )
    program = program.replace(
        "x, w = (torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in ((2, 1024, 512), (512, 1536)))",
        "parts = [torch.empty(2, 4, 300, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]",
    )
    output = run_forked(FAKE_GPU, program).stdout
    plan, _, _ = json.loads(output.splitlines()[-1])
    assert plan.startswith("hopper/bent_fold/")
