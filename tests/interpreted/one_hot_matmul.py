"""Run in Triton's interpreter: sums to few rows against PyTorch's in double precision.

Usage: ``python -m tests.interpreted.one_hot_matmul COUNT``; prints how many random cases were compared.
"""

from __future__ import annotations

import os
import random

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import torch

from dash_inductor.passes.ops.kernels.sums import one_hot_matmul as few

from .sums import expected, run

EPS = {torch.float32: 1e-5, torch.float16: 3e-3}
"""The interpreter has no products of bf16."""


def compare(rng: random.Random) -> None:
    """Several chunks and levels of parts, what is left out, numbers that are not finite, and any layout of values."""
    few.CHUNK, few.OF_A_ROW, few.STEP, few.COLUMNS, few.GROUP, few.BLOCK = 32, 1, 16, 16, 2, 16
    batch, rows, columns = rng.choice((1, 2)), rng.choice((1, 3, 20)), rng.choice((1, 5, 20))
    count, dtype = rng.choice((0, 1, 40, 170)), rng.choice(list(EPS))
    keys = torch.randint(0, rows + 1, (count,)).to(rng.choice((torch.uint8, torch.int16, torch.int32)))
    values = torch.randn(batch, count, columns).to(dtype)
    if rng.random() < 0.5:
        values = torch.randn(count, columns, batch).to(dtype).permute(2, 0, 1)
    left_out = values.clone()
    left_out[:, keys == rows] = float("nan")  # which is not read
    if count and rng.random() < 0.5:
        left_out[0, 0, 0] = values[0, 0, 0] = float("inf")
    base = torch.randn(batch, rows, columns).to(dtype) if rng.random() < 0.5 else None
    found = few.add_few(base, left_out, keys, rows)
    assert found.is_contiguous()
    wanted = expected(base, values, keys.long(), rows)
    torch.testing.assert_close(found.double(), wanted, rtol=EPS[dtype], atol=10 * EPS[dtype])
    for b in range(batch):  # alone
        alone = few.add_few(None if base is None else base[b : b + 1], left_out[b : b + 1], keys, rows)
        assert torch.equal(alone, found[b : b + 1]) or columns == 1  # which are summed in columns


if __name__ == "__main__":
    run(compare)
