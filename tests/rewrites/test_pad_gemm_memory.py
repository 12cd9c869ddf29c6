"""What the code of a language model's head allocates on an H100, where its products are padded."""

from __future__ import annotations

import json
import re

import pytest

from ..support.distribution import ROOT
from ..support.fakecuda import compiler
from ..support.processes import run_python

PROGRAM = """
    import json

    from tests.support import fakecuda, mockgpu

    mockgpu.install_driver()
    fakecuda.install()
    import torch
    import torch._functorch.config
    import torch._inductor.config
    import torch.nn.functional as F
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    mockgpu.install_torch()
    import dash_inductor

    class Compiled(Exception):
        pass

    codes = []

    def save(code):
        codes.append(code)
        if len(codes) == 2:
            raise Compiled  # nothing can be loaded

    AsyncCompile.triton = lambda *args, **kwargs: None
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    GraphLowering.save_output_code = staticmethod(save)
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
    # Both compute on the device.
    torch._inductor.config.joint_graph_constant_folding = torch._inductor.config.shape_padding = False
    torch._functorch.config.force_non_lazy_backward_lowering = True
    torch.use_deterministic_algorithms(True)

    def head(x, weight, targets):
        return F.cross_entropy(F.linear(torch.tanh(x), weight).float(), targets)

    with FakeTensorMode():
        x, weight = (torch.empty(n, 768, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (4096, 50257))
        try:
            torch.compile(head)(x, weight, torch.empty(4096, device="cuda", dtype=torch.int64))
        except Exception:
            if len(codes) < 2:
                raise
    print(json.dumps(codes))
"""


@pytest.mark.full
@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_the_gradient_of_logits_takes_their_place() -> None:
    """The forward allocates the padded logits, and the backward no tensor of their size."""
    codes = json.loads(run_python(PROGRAM, path=ROOT).stdout.splitlines()[-1])
    wide = [re.findall(r"empty_strided_cuda\(\((?:4096|s\d+), (502\d\d|503\d\d)\)", code) for code in codes]
    assert wide == [["50304"], []]
