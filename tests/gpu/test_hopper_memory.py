"""Memory of the Hopper backward beyond its inputs: gradients, one fp32 dq, fp32 sums of groups, a few words per row."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from dash_inductor.model import Band

from ..support.attention import Attention
from ..support.hopper import MARKS, Direct, any_forward

pytestmark = MARKS

HEADS, HEAD_DIM = 16, 128


def peak(run: Callable[[], object]) -> int:
    """Bytes that a call asks for at once, beyond what is there before it; the first call loads and compiles.

    The allocator may give more, if a block that it has kept is a little larger.
    """
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    run()
    torch.cuda.synchronize()
    found: int = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    return found


def problem(length: int, group: int = 1) -> Attention:
    return Attention.random(length, length, HEAD_DIM, Band(0), batch=1, kv_heads=HEADS // group, group=group)


def flash(p: Attention) -> Callable[[], object]:
    """PyTorch's FlashAttention-2, which is deterministic under deterministic algorithms."""
    length = p.q.shape[2]
    out, lse = any_forward(p)
    do, q, k, v, o = (t.transpose(1, 2) for t in (p.do, p.q, p.k, p.v, out))
    state = torch.zeros(2, dtype=torch.uint64, device="cuda"), torch.zeros((), dtype=torch.uint64, device="cuda")
    return lambda: torch.ops.aten._flash_attention_backward(
        do, q, k, v, o, lse, None, None, length, length, 0.0, True, *state, scale=p.scale
    )


@pytest.mark.parametrize("group", [1, 8])
def test_peak(deterministic: None, group: int) -> None:
    p = problem(8192, group)
    ours = peak(Direct(p, "spt", forward=any_forward(p)))
    gradients = 2 * (p.q.numel() + p.k.numel() + p.v.numel())
    accumulator = 4 * p.q.numel()
    sums = 0 if group == 1 else 4 * (p.k.numel() + p.v.numel())
    words = 16 * p.q.numel() // HEAD_DIM  # log-sum-exp and delta are 8 bytes per row; semaphores and alignment are less
    assert ours <= gradients + accumulator + sums + words
    theirs = peak(flash(p))
    assert ours < theirs, f"{ours / 2**20:.0f} MiB, FlashAttention-2 {theirs / 2**20:.0f} MiB"


def test_no_quadratic_term() -> None:
    lengths = (2048, 4096, 8192, 16384)
    peaks = [peak(Direct(p, "spt", forward=any_forward(p))) for p in map(problem, lengths)]
    assert all(b <= 2 * a for a, b in itertools.pairwise(peaks)), peaks
