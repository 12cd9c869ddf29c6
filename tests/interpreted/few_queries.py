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
from dash_inductor.kernels.common.call_launches import Address, CallLaunch
from dash_inductor.kernels.hopper import kernel_configs
from dash_inductor.kernels.hopper.forward import arguments, few
from dash_inductor.kernels.hopper.forward.device import few as device
from dash_inductor.model import AttentionSpec, Band, Mask, Site

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
    """As what `few.launches` returns, with the kernels as they stand."""
    spec = AttentionSpec(Mask(Band()), scale, ((0, 2, 1, 3),))
    site = Site("cuda", "float16", *q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], spec)
    form = few.Kernels(few.Specialisation.of_site(site)).form._replace(BLOCK_KV=16)
    grids: list[int] = []
    with (
        mock.patch.object(launcher, "KernelLauncher", lambda kernel, grid: grids.append(grid)),
        mock.patch.object(few, "kernels", return_value=SimpleNamespace(form=form, attend=None, combine=None)),
        mock.patch.object(few, "CallLaunches", lambda asked, allocated, *_: SimpleNamespace(run=(asked, allocated))),
    ):
        found: Any = few.launches(site, q, k, v)
    (attend, combine), allocated = found
    out, lse, acc = (torch.empty_strided(*of[:2], dtype=of[2]).fill_(float("nan")) for of in allocated)
    known = q, k, v, out, lse, acc
    constants = arguments.Few(*map(tl.constexpr, form))

    def given(of: CallLaunch) -> list[Any]:
        return [
            known[each.number].view(-1)[each.offset // 4 :] if isinstance(each, Address) and each.offset
            else known[each.number] if isinstance(each, Address)
            else Strides(*each) if isinstance(each, tuple) else each
            for each in of.arguments
        ]  # fmt: skip

    device.attend[grids[0],](*given(attend), constants)
    device.combine[grids[1],](*given(combine), constants, kernel_configs.MOST_PARTS)
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
