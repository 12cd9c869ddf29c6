"""Run in Triton's interpreter: sums of segments against PyTorch's in double precision.

Usage: ``python -m tests.interpreted.sums COUNT``; prints how many random cases were compared.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import torch
from torch import Tensor

from dash_inductor.passes.ops.kernels.sums import launch

EPS = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def expected(base: Tensor | None, values: Tensor, rows_of: Tensor, rows: int) -> Tensor:
    sums = torch.zeros(values.shape[0], rows + 1, values.shape[2], dtype=torch.float64)
    sums = sums.index_add(1, rows_of, values.double())[:, :rows]
    return sums if base is None else base.double() + sums


def compare(rng: random.Random) -> None:
    """Few and many rows, hot ones, several levels of parts, values that are left out, and any layout of values."""
    launch.NARROW, launch.ELEMENTS, launch.ENTRIES = rng.choice((0, 2)), rng.choice((16, 32)), rng.choice((4, 8))
    launch.WALKED, launch.COLUMNS = 8, 4
    batch, rows, columns = rng.choice((1, 2)), rng.choice((1, 3, 30)), rng.choice((1, 3, 5))
    count, dtype = rng.choice((0, 1, 7, 40, 80)), rng.choice(list(EPS))
    rows_of = torch.randint(0, rows + 1, (count,))
    if rng.random() < 0.5:
        rows_of[torch.rand(count) < 0.8] = rows // 2
    named = rng.choice((None, torch.int32, torch.int64))  # values are rows of another tensor
    length = count if named is None else 5
    values = torch.randn(batch, length, columns).to(dtype)
    if rng.random() < 0.5:
        values = torch.randn(length, columns, batch).to(dtype).permute(2, 0, 1)
    if count and named is None and rng.random() < 0.3:
        values[:, 0] = float("inf")  # of one row alone
    base = torch.randn(batch, rows, columns).to(dtype) if rng.random() < 0.5 else None
    keys, order = rows_of.to(rng.choice((torch.uint8, torch.int16, torch.int32))).sort(stable=True)
    each = values
    if named is not None:
        rows_named = torch.randint(0, length, (count,))
        each, order = values[:, rows_named], rows_named[order].to(named)
    found = launch.add_segments(base, values, keys, order, rows)
    assert found.is_contiguous()
    torch.testing.assert_close(
        found.double(), expected(base, each, rows_of, rows), rtol=EPS[dtype], atol=10 * EPS[dtype]
    )
    for b in range(batch):  # alone
        alone = launch.add_segments(None if base is None else base[b : b + 1], values[b : b + 1], keys, order, rows)
        assert torch.equal(alone, found[b : b + 1]) or columns == 1  # which are summed in columns


def run(compare: Callable[[random.Random], None]) -> None:
    """Compare as many random cases as the command line says."""
    torch.manual_seed(0)
    for seed in range(int(sys.argv[1])):
        try:
            compare(random.Random(seed))
        except Exception as error:
            raise RuntimeError(f"seed {seed}") from error
    print("compared", sys.argv[1])


if __name__ == "__main__":
    run(compare)
