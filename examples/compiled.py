"""What an attention backward compiles to on a GPU that need not be there: plan, kernels and what they take."""

from __future__ import annotations

from dash_inductor.kernels.standalone import Rendered, compile_for, render

from dash_inductor.schedule import plan
from dash_inductor.schedule.problem import Band, Plan, Site

H100 = "sm_90"

SITE = Site(
    device="cuda",
    dtype="bfloat16",
    batch=2,
    q_heads=16,
    kv_heads=4,
    q_len=8192,
    kv_len=8192,
    head_dim=128,
    value_dim=128,
    mask=Band(lo=0),
    scale=128**-0.5,
)
"""The attention of a Llama with hidden size 2048 at sequence length 8192, batch 2."""


def kernel_table(site: Site, arch: str) -> tuple[Plan, str]:
    """The plan of a site on an architecture, and its kernels as a text table; compiles them (seconds)."""
    chosen = plan(site, arch)
    rows = [("kernel", "tiles (q x kv)", "warps", "stages", "CTAs", "registers", "spilled bytes", "shared memory")]
    for kernel in render(chosen, site):
        _, used = compile_for(kernel, arch)
        tiles = kernel.tiles
        spilled = used.spill_stores + used.spill_loads
        numbers = (tiles.num_warps, tiles.num_stages, kernel.grid, used.registers, spilled)
        shape, shared = f"{tiles.block_q} x {tiles.block_kv}", f"{used.shared_memory / 1024:.1f} KiB"
        rows.append((_gradients(kernel), shape, *map(str, numbers), shared))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return chosen, "\n".join(lines)


def _gradients(kernel: Rendered) -> str:
    if "DQ_OUT" in kernel.names:
        return "dq"
    if "K" not in kernel.names:
        return "delta"
    return "dq, dk, dv" if "DQ" in kernel.names else "dk, dv"
