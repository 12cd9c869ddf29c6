"""Run in Triton's interpreter: what lies behind the last offset is NaN, and nothing else has changed."""

from __future__ import annotations

import itertools
import os

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import torch

from dash_inductor.passes.ops.kernels.groups import launch

if __name__ == "__main__":
    launch.PROGRAMS, launch.BLOCK = 3, 4
    for dim, last, dtype in itertools.product((0, 1), (0, 1, 4, 9, 11), (torch.bfloat16, torch.float32)):
        plain = torch.randn(9, 16).to(dtype)
        whole, offsets = plain.clone(), torch.tensor([0, last], dtype=torch.int32)
        launch.fill_behind(whole[:, :11], offsets, dim)
        wanted = plain.clone()
        wanted[:, :11][(slice(None),) * dim + (slice(last, None),)] = float("nan")
        assert torch.equal(whole.nan_to_num(99), wanted.nan_to_num(99)), (dim, last)
    print("compared")
