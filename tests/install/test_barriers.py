"""Threads of a kernel wait before they read what other threads of it have written."""

from __future__ import annotations

import json

import pytest

from ..support.fakecuda import compiler
from ..support.forks import FAKE_GPU, run_forked
from ..support.read_back import read_back

PROGRAM = """
    import contextlib, json

    import torch
    import torch._inductor.config
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    import dash_inductor
    from tests.support.norms import gradient_of_norm

    codes = []
    GraphLowering.save_output_code = staticmethod(codes.append)
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.joint_graph_constant_folding = False
    torch.use_deterministic_algorithms(True)
    for active in (True, False):
        torch._dynamo.reset()
        with contextlib.ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            if not active:
                stack.enter_context(dash_inductor.disabled())
            half = torch.empty(256, 4096, device="cuda", dtype=torch.bfloat16)
            places = torch.empty(256, 2, device="cuda", dtype=torch.int64)
            with contextlib.suppress(Exception):
                torch.compile(gradient_of_norm)(half, places, half, half[0])
    print(json.dumps(codes))
"""


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_generated_code() -> None:
    output = run_forked(FAKE_GPU, PROGRAM).stdout
    ours, plain = json.loads(output.splitlines()[-1])
    assert "tl.debug_barrier()" in ours
    assert not [*read_back(ours)]
    assert [*read_back(plain)] or "tl.debug_barrier()" in plain  # which torch 2.15 writes itself
