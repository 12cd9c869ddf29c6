"""The plan and the kernels of a compiled attention backward, and what they take, for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dash_inductor.kernels.portable.standalone import Rendered, Resources, compile_for, render, resources
from dash_inductor.model import AttentionSpec, Band, Mask, Plan, Site, Tiles
from dash_inductor.model.architectures import WORKERS
from dash_inductor.planning import plan

H100 = "sm_90"
Row = tuple[str, Tiles, int, Resources]

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
    spec=AttentionSpec(Mask(Band(lo=0)), 128**-0.5),
)
"""The attention of a Llama with hidden size 2048 at sequence length 8192, batch 2."""

LEGEND = """\
kernel         what it computes; the second one does the work, the others prepare and finish
tiles          queries x keys that a CTA (a block of threads) takes at once
warps, stages  groups of 32 threads of a CTA, and tiles that are loaded ahead
CTAs           how many of them the backward launches; in the second kernel there is one for each
               SM, which takes tiles of keys until there are no more
registers      of a thread when it starts, as the assembler allots them
spilled bytes  what a thread stores to memory and loads back, because its registers do not suffice
shared memory  of a CTA"""
"""The meanings of the columns of the table."""


def kernel_table(site: Site, arch: str) -> tuple[Plan, str]:
    """The plan of a site on an architecture, and its kernels as a text table; compiles them (seconds)."""
    chosen = plan(site, arch)
    rows = [("kernel", "tiles (q x kv)", "warps", "stages", "CTAs", "registers", "spilled bytes", "shared memory")]
    kernels = _hopper(chosen, site) if chosen.kernel == "hopper" else _portable(chosen, site, arch)
    for name, tiles, ctas, used in kernels:
        spilled = used.spill_stores + used.spill_loads
        numbers = (tiles.num_warps, tiles.num_stages, ctas, used.registers, spilled)
        shape, shared = f"{tiles.block_q} x {tiles.block_kv}", f"{used.shared_memory / 1024:.1f} KiB"
        rows.append((name, shape, *map(str, numbers), shared))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return chosen, "\n".join(lines)


def _portable(chosen: Plan, site: Site, arch: str) -> Iterator[Row]:
    for kernel in render(chosen, site):
        yield _gradients(kernel), kernel.tiles, kernel.grid, compile_for(kernel, arch)[1]


def _hopper(chosen: Plan, site: Site) -> Iterator[Row]:
    """Before, in and after the Hopper kernel; registers are counted at the start, before roles share them."""
    from dash_inductor.kernels.hopper.backward import build

    assert site.batch is not None
    assert site.q_len is not None
    assert site.kv_len is not None
    kernels, tiles = build.Kernels(build.Specialisation.of_site(site, chosen)), chosen.dkdv
    q_tiles = site.batch * site.q_heads * -(-site.q_len // tiles.block_q)
    kv_tiles = site.batch * site.q_heads * -(-site.kv_len // tiles.block_kv)
    yield "delta, lse", tiles, q_tiles, resources(kernels.prepare, H100)
    yield "dq, dk, dv", tiles, min(kv_tiles, WORKERS[H100]), resources(kernels.main, H100)
    rows = replace(tiles, num_warps=build.FINISH_WARPS)
    yield "dq", rows, q_tiles * (tiles.block_q // build.FINISH_ROWS), resources(kernels.finish, H100)


def _gradients(kernel: Rendered) -> str:
    if "DQ_OUT" in kernel.names:
        return "dq"
    if "K" not in kernel.names:
        return "delta"
    return "dq, dk, dv" if "DQ" in kernel.names else "dk, dv"
