"""Kernels that read back what other threads have written: values, and the same bits in every run."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

from ..support.norms import gradient_of_norm
from ..support.read_back import read_back

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("columns", [256, 768, 2880])
def test_values_and_bits(columns: int) -> None:
    torch.manual_seed(0)
    expert, x = torch.randn(2, 4096, columns, device="cuda", dtype=torch.bfloat16)
    places = torch.randint(0, 4096, (4096, 2), device="cuda")
    weight = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()
    with fresh_inductor_cache():
        compiled = torch.compile(gradient_of_norm)
        first, codes = run_and_get_code(compiled, expert, places, x, weight)
    assert not [found for code in codes for found in read_back(code)]
    for _ in range(200):
        left_behind = torch.full((4096, columns), float("nan"), device="cuda")
        del left_behind  # the memory of the next gradient
        again = compiled(expert, places, x, weight)
        assert all(map(torch.equal, first, again))
    gradient = (expert[places[:, 0]] + expert[places[:, 1]]).double()
    total = (gradient * weight.double() * x.double()).sum(1, keepdim=True)
    wanted = x.double() - (gradient * weight.double() - total * x.double())
    for found, exact in zip(first, (gradient, wanted), strict=True):
        assert (found.double() - exact).norm() <= 1e-2 * exact.norm()
