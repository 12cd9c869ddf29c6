"""Run the portable kernels under masks of rows in Triton's interpreter, through Inductor.

    python -m tests.interpreted.varlen CASE ...

A program of its own, as it claims a GPU.  A case is SCHEDULE,BAND,GROUP,DTYPE,LENGTHS, where a semicolon stands for the
comma of a band, and lengths are joined by plus signs; after the schedule may follow ":dynamic".  One line of output per
case: "exact" or "failed: ..", see `check`.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from ..support.mockgpu import install_driver  # Triton reads the environment when it is imported

install_driver()

import math  # noqa: E402
from dataclasses import replace  # noqa: E402

import torch  # noqa: E402
import torch._inductor.config as inductor_config  # noqa: E402
from torch import Tensor  # noqa: E402

from dash_inductor import lowering  # noqa: E402
from dash_inductor.model import AttentionSpec, Band, Plan, Tiles  # noqa: E402
from dash_inductor.operators import attention as ops  # noqa: E402

from ..support.packed import packed_attention  # noqa: E402
from ..support.varlen_layout import Rows, mask_of  # noqa: E402

DIM, SCALE, ORDER = 24, 24**-0.5, (0, 2, 1, 3)
TILES = Tiles(64, 32, 4, 1)
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-2}


def problem(rows: Rows, group: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output: [1, heads, tokens, DIM]."""
    generator = torch.Generator().manual_seed(rows.tokens)
    kv_heads = 1 if group > 1 else 2
    heads = kv_heads * group, kv_heads, kv_heads, kv_heads * group
    return [torch.randn(1, rows.tokens, n, DIM, generator=generator).to(dtype).transpose(1, 2) for n in heads]


def attention(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, extras: list[Tensor], band: Band, plan: Plan
) -> tuple[Tensor, ...]:
    """The output, the log-sum-exp, dq, dk and dv, by operators that take and give [tokens, heads, DIM]."""
    calls = [str(AttentionSpec(mask_of(band), SCALE, (ORDER,) * n)) for n in (1, 3)]
    q, k, v, do = (t.transpose(1, 2)[0] for t in (q, k, v, do))
    out, lse = ops.attention_forward(q, k, v, extras, calls[0], str(plan), "forward")
    gradients = ops.attention_backward(do, q, k, v, out, lse, extras, calls[1], str(plan), "backward")
    out, *gradients = (t[None].transpose(1, 2) for t in (out, *gradients))
    return out, lse, *gradients


def exact(tensors: list[Tensor], rows: Rows, band: Band) -> list[Tensor]:
    """The output, dq, dk and dv in fp64, of every document alone."""
    *leaves, do = (t.double().transpose(1, 2)[0] for t in tensors)
    for t in leaves:
        t.requires_grad_()
    window = -1 if band.hi is None else band.hi, -1 if band.lo is None else -band.lo
    out = packed_attention(*leaves, torch.tensor(rows.starts), window)
    found = out, *torch.autograd.grad(out, leaves, do)
    return [t.detach()[None].transpose(1, 2) for t in found]


def check(schedule: str, band: Band, group: int, dtype: torch.dtype, lengths: tuple[int, ...]) -> str:
    """Every document has the values of attention, and the bits that it has alone, beside whatever."""
    schedule, _, sizes = schedule.partition(":")
    dq = TILES if schedule == "two_pass" else None
    plan = Plan("portable", schedule, "portable", replace(TILES, block_q=32, block_kv=64), dq, head_chunk=3,
                forward_tiles=TILES)  # fmt: skip
    torch._dynamo.reset()
    compiled = torch.compile(attention, dynamic=False)

    def run(tensors: list[Tensor], rows: Rows, elsewhere: int | None = None) -> list[Tensor]:
        tensors, extras = [t.detach().clone() for t in tensors], rows.operands(elsewhere=elsewhere)
        if sizes == "dynamic":
            for t in (*tensors, *extras):
                torch._dynamo.mark_dynamic(t, {4: 2, 2: 1, 1: 0}[t.dim()])
        found = compiled(*tensors, extras, band, plan)
        assert found[1].shape == (1, tensors[0].shape[1], rows.rows)
        nobody = torch.tensor([token is None for token in rows.tokens_of_rows()])
        assert (found[1][:, :, nobody] == -math.inf).all(), "a row without a token has another log-sum-exp than -inf"
        return [found[0], *found[2:]]

    rows = Rows(lengths, behind=3)
    tensors = problem(rows, group, dtype)
    results = run(tensors, rows)
    for name, ours, true in zip(("out", "dq", "dk", "dv"), results, exact(tensors, rows, band), strict=True):
        error = (ours.double() - true).abs().max().item()
        assert error <= TOLERANCE[dtype] * max(1.0, true.abs().max().item()), f"{name}: {error:.1e}"
    for length, start in zip(lengths, rows.starts, strict=False):
        part = slice(start, start + length)
        own = [t[:, :, part] for t in tensors]
        if not length:
            continue
        alone = run(own, Rows((length,)))
        assert all(map(torch.equal, alone, (t[:, :, part] for t in results))), f"{length} alone"
        filled = [torch.full_like(t, math.nan) for t in tensors]
        for t, values in zip(filled, own, strict=True):
            t[:, :, part] = values
        again = run(filled, rows, elsewhere=0)
        equal = [torch.equal(a, b[:, :, part]) for a, b in zip(alone, again, strict=True)]
        assert all(equal), f"{length} among NaN: {equal}"
    return "exact"


def main(cases: list[str]) -> None:
    inductor_config.cpu_backend = "triton"
    lowering.register()
    for case in cases:
        schedule, band, group, dtype, lengths = case.split(",")
        arguments = Band.parse(band.replace(";", ",")), int(group), getattr(torch, dtype)
        try:
            result = check(schedule, *arguments, tuple(map(int, lengths.split("+"))))
        except AssertionError as error:
            result = f"failed: {error}"
        print("RESULT", result, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
