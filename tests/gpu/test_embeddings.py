"""The gradient of an embedding under deterministic algorithms, on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ..support.repeats import differing_runs
from .embeddings import gradient


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
