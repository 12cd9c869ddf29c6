"""Run under compute-sanitizer: small calls of the Hopper forward.  Prints ``done`` at the end.

Usage: ``compute-sanitizer ... python -m tests.support.hopper_forward_sanitized``.  Results are not looked at: initcheck
does not see what TMA writes.
"""

from __future__ import annotations

import torch

from dash_inductor.model import Band

from . import plain_lines
from .attention import Attention
from .hopper_forward import forward

CASES = [
    ((64, 64), Band(), 2, 200, 200),
    ((64, 64), Band(0), 2, 300, 300),
    ((128, 128), Band(0), 4, 300, 300),
    ((192, 128), Band(0, 50), 1, 150, 100),
    ((256, 256), Band(None, -5), 1, 33, 170),
    ((72, 40), Band(), 1, 70, 90),
]


def main() -> None:
    plain_lines.install()
    kept = []  # freed memory could be another call's
    for (head_dim, value_dim), mask, group, q_len, kv_len in CASES:
        p = Attention.random(q_len, kv_len, head_dim, mask, batch=2, kv_heads=2, group=group, value_dim=value_dim)
        kept.append((p, forward(p), forward(p, ctas=2)))
        torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
