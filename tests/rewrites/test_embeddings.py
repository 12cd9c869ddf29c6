"""The gradient of an embedding under deterministic algorithms: PyTorch's own kernel on CUDA, nothing else elsewhere."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.rewrites.embeddings import FEW, by_sums

from ..support.distribution import ROOT
from ..support.fakecuda import compiler
from ..support.processes import run_python
from ..support.repeats import differing_runs

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


def gradient(indices: Tensor, weight: Tensor, padding: int | None, grad: Tensor) -> Tensor:
    leaf = weight.detach().requires_grad_()
    (found,) = torch.autograd.grad(F.embedding(indices, leaf, padding_idx=padding), leaf, grad)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_gradients_on_a_gpu(mode: str, padding: int | None, dtype: torch.dtype, deterministic: None) -> None:
    """Few and many rows, equal indices and different ones; two runs have the same bits, under load too."""
    generator = torch.Generator("cuda").manual_seed(0)
    for rows, count in ((2, 30000), (3, 100), (5, 30000), (1000, 30000), (50000, 20000)):
        indices = torch.randint(0, rows, (2, count // 2), device="cuda", generator=generator)
        indices[:, ::3] = 0
        weight = torch.randn(rows, 256, device="cuda", generator=generator).to(dtype)
        grad = torch.randn(2, count // 2, 256, device="cuda", generator=generator).to(dtype)
        torch._dynamo.reset()
        compiled = torch.compile(F.embedding, mode=mode)

        def run(indices=indices, weight=weight, grad=grad, compiled=compiled):  # type: ignore[no-untyped-def]
            torch.compiler.cudagraph_mark_step_begin()
            leaf = weight.detach().requires_grad_()
            (found,) = torch.autograd.grad(compiled(indices, leaf, padding), leaf, grad)
            return [found.clone()]

        exact = gradient(indices, weight.double(), padding, grad.double())
        found = run()[0]
        roundings = 16 if dtype is torch.float32 else 1  # sums of 10000 numbers are made in fp32
        assert (found - exact).norm() <= roundings * torch.finfo(dtype).eps * exact.norm()
        assert differing_runs(run, 50, load=True) == 0


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
