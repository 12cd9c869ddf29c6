"""The gradient of an embedding under deterministic algorithms: PyTorch's own kernel on CUDA, nothing else elsewhere."""

from __future__ import annotations

import json

import pytest
import torch

from dash_inductor.rewrites.embeddings import FEW, by_sums

from ..support.distribution import ROOT
from ..support.fakecuda import compiler
from ..support.processes import run_python

KEPT = "aten.embedding_dense_backward.default"
PROGRAM = """
    import contextlib, json

    from tests.support import fakecuda, mockgpu

    mockgpu.install_driver()
    fakecuda.install()
    import torch
    import torch._inductor.compile_fx  # installs our pass: what looks at graphs comes after it
    import torch._inductor.config
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode

    mockgpu.install_torch()
    import dash_inductor
    from dash_inductor.upstream import compat

    seen = []

    class Look:
        def apply(self, graph):
            seen.append([str(node.target) for node in graph.nodes])
            return 0

    compat.joint_passes().append(Look())
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.joint_graph_constant_folding = False  # it computes with real tensors

    def embed(indices, weight):
        return F.embedding(indices, weight).sin()

    found = []
    for deterministic, active, rows in ((True, True, 1000), (True, True, 2), (True, False, 1000), (False, True, 1000)):
        torch.use_deterministic_algorithms(deterministic)
        torch._dynamo.reset()
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), contextlib.ExitStack() as stack:
            if not active:
                stack.enter_context(dash_inductor.disabled())
            indices, weight = torch.zeros(8, 512, dtype=torch.int64), torch.empty(rows, 64, requires_grad=True)
            with contextlib.suppress(Exception):
                torch.compile(embed)(indices, weight)
        found.append(seen.pop())
    print(json.dumps(found))
"""


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_what_becomes_of_the_operator_on_cuda_under_deterministic_algorithms_while_we_are_active() -> None:
    output = run_python(PROGRAM, path=ROOT, TORCHINDUCTOR_COMPILE_THREADS=1).stdout
    kept, few, off, default = json.loads(output.splitlines()[-1])
    assert [name for name in kept if "embedding" in name] == ["aten.embedding.default", KEPT]
    assert KEPT not in few + off + default
    assert not [name for name in kept + few if "index_put" in name]
    assert few.count("aten.sum.dim_IntList") == 2


def test_the_cpu_keeps_its_decomposition(deterministic: None) -> None:
    from torch._inductor.decomposition import decompositions

    decompose = decompositions[torch.ops.aten.embedding_dense_backward.default]
    grad, indices = torch.randn(3, 4), torch.tensor([0, 2, 2])
    found = decompose(grad, indices, 5, -1, False)
    assert torch.equal(found, torch.zeros(5, 4).index_add(0, indices, grad))


@pytest.mark.parametrize("padding", [-1, 0, 1])
@pytest.mark.parametrize("rows", [1, 2, FEW])
def test_tables_of_few_rows_are_sums(rows: int, padding: int) -> None:
    """Indices of any shape and integer type, or none; rows that nobody reads, and the row of the padding."""
    for shape, dtype in (((30,), torch.int64), ((4, 9), torch.int32), ((2, 3, 5), torch.int64), ((0, 7), torch.int64)):
        indices = torch.randint(0, min(rows, 3), shape).to(dtype)
        grad = torch.randn(*shape, 6)
        expected = torch.ops.aten.embedding_dense_backward(grad, indices, rows, padding, False)
        torch.testing.assert_close(by_sums(grad, indices, rows, padding, False), expected)


def test_other_tables_are_left_to_the_operator() -> None:
    grad, indices = torch.randn(30, 6), torch.zeros(30, dtype=torch.int64)
    assert by_sums(grad, indices, FEW + 1, -1, False) is NotImplemented
    assert by_sums(grad[:0], indices[:0], 0, -1, False) is NotImplemented
    assert by_sums(grad, indices, FEW, -1, True) is NotImplemented
