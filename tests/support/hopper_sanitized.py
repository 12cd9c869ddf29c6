"""Run under compute-sanitizer: small calls of the Hopper kernel, with the memory that only TMA writes.

Usage: ``compute-sanitizer ... python -m tests.support.hopper_sanitized [--control]``.  Prints the address ranges of
every call's dq accumulator, dk and dv as ``tma <first> <end>`` (hexadecimal), and ``done`` at the end.  --control reads
other memory that nobody wrote.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from dash_inductor.model import Band
from dash_inductor.upstream import compat

from . import plain_lines
from .attention import Attention
from .hopper import Direct, any_forward

# head dims of q and of v, mask, schedule, group, q_len; tile schedules over 64 q tiles of 64 rows are bent
CASES = [
    (64, 64, Band(), "ascending", 2, 200),
    (128, 128, Band(0), "bent_fold", 4, 4200),
    (192, 128, Band(0), "spt", 1, 200),
]


def main() -> None:
    plain_lines.install()
    allocated: list[torch.Tensor] = []
    allocate = compat.empty_cuda

    def recorded(*facts: Any) -> torch.Tensor:
        allocated.append(allocate(*facts))
        return allocated[-1]

    compat.empty_cuda = recorded
    kept = []  # freed memory could be another call's
    for head_dim, value_dim, mask, schedule, group, q_len in CASES:
        p = Attention.random(q_len, 200, head_dim, mask, batch=1, kv_heads=1, group=group, value_dim=value_dim)
        run = Direct(p, schedule, forward=any_forward(p))
        for _ in range(2):
            run()
            _, dk, dv, workspace = allocated
            kept.append((run, *allocated))
            allocated.clear()
            rows = -(-p.q.shape[2] // run.plan.dkdv.block_q) * run.plan.dkdv.block_q
            accumulator = workspace.data_ptr(), workspace.data_ptr() + 4 * group * rows * head_dim
            for first, end in (accumulator, _range(dk), _range(dv)):
                print("tma", hex(first), hex(end))
            torch.cuda.synchronize()
            assert all(tensor.isfinite().all() for tensor in (dk, dv))
    if "--control" in sys.argv:
        torch.empty(1024, device="cuda").add_(1)
        torch.cuda.synchronize()
    print("done")


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes()


if __name__ == "__main__":
    main()
