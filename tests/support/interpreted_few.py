"""Run the kernels for few queries in Triton's interpreter, a program of its own: one line for each case of `CASES`.

Errors are the largest of out and log-sum-exp against fp64, relative to the largest value; then it says that heads alone
have the same bits, and that memory beside the operands, which is NaN, has no part in them.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

from collections import namedtuple
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor

from dash_inductor.kernels.common import launcher
from dash_inductor.kernels.hopper import kernel_configs
from dash_inductor.kernels.hopper.forward import arguments, few
from dash_inductor.kernels.hopper.forward.device import few as device

Strides = namedtuple("Strides", arguments.FEW_STRIDES.names)  # type: ignore[misc]  # names of arguments

CASES = [  # batch, q heads, kv heads, q_len, kv_len, head dim, value dim, layout
    (2, 4, 2, 1, 70, 24, 16, "bshd"),
    (1, 2, 2, 5, 33, 16, 24, "bhsd"),
    (1, 4, 1, 3, 260, 16, 16, "bshd"),
]


def operand(batch: int, heads: int, length: int, dim: int, layout: str) -> Tensor:
    """Random numbers with NaN behind them in every dimension."""
    sizes = (batch + 1, length + 3, heads + 1, dim + 8)
    whole = torch.full(sizes if layout == "bshd" else (sizes[0], sizes[2], sizes[1], sizes[3]), float("nan"))
    whole = whole.half()
    found = (whole.transpose(1, 2) if layout == "bshd" else whole)[:batch, :heads, :length, :dim]
    return found.copy_(torch.randn(found.shape))


def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `few.State.run`, with the kernels as they stand."""
    built = few.Kernels(
        few.Specialisation.of("float16", (q.shape[3], v.shape[3]), q.shape[2], q.shape[1] // k.shape[1])
    )
    form = built.form._replace(BLOCK_KV=16)
    grids: list[int] = []
    with (
        mock.patch.object(launcher, "KernelLauncher", lambda kernel, grid: grids.append(grid)),
        mock.patch.object(few, "kernels", return_value=SimpleNamespace(form=form, attend=None, combine=None)),
    ):
        state = few.State(
            scale, (0, 2, 1, 3), q.dtype, torch.device("cuda", 0), q.shape, q.stride(), k.stride(), v.shape, v.stride()
        )  # fmt: skip
    out, lse, acc = (
        torch.empty_strided(*of[:2], dtype=of[2]).fill_(float("nan")) for of in (state.out, state.lse, state.acc)
    )
    sums = acc[state.behind_acc // 4 :]
    constants = arguments.Few(*map(tl.constexpr, form))

    def given(sizes: Any) -> list[Any]:
        return [Strides(*size) if isinstance(size, tuple) else size for size in sizes]

    device.attend[grids[0],](q, k, v, acc, sums, *given(state.sizes), constants)
    device.combine[grids[1],](acc, sums, out, lse, *given(state.combine_sizes), constants, kernel_configs.MOST_PARTS)
    return out, lse


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    s = q.double() @ k.mT * scale
    return s.softmax(-1) @ v, s.logsumexp(-1)


def main() -> None:
    torch.manual_seed(0)
    kernel_configs.PART = 16
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(device, name, lambda: None)
    for batch, q_heads, kv_heads, q_len, kv_len, dim, value_dim, layout in CASES:
        q = operand(batch, q_heads, q_len, dim, layout)
        k, v = (operand(batch, kv_heads, kv_len, d, layout) for d in (dim, value_dim))
        results = run(q, k, v, 0.3)
        errors = [
            float((x.double() - y).abs().max() / y.abs().max())
            for x, y in zip(results, exact(q, k, v, 0.3), strict=True)
        ]
        group = q_heads // kv_heads
        b, h = batch - 1, kv_heads - 1
        alone = run(q[b:, h * group :], k[b:, h:], v[b:, h:], 0.3)
        for one, whole in zip(alone, results, strict=True):
            assert torch.equal(one[0], whole[b, h * group :])
        parts = -(-kv_len // kernel_configs.part_of(kv_len))
        print("RESULT", parts, " ".join(f"{e:.1e}" for e in errors), flush=True)


if __name__ == "__main__":
    main()
