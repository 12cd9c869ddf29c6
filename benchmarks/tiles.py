"""Time of the portable kernels for every candidate tile shape: the source of the planner's tile table.

    python -m benchmarks.tiles [--quick] [--name tiles_h100]

Kernels are rendered without Inductor, compiled in parallel and launched directly; each is checked against fp32 first.
TFLOP/s count what the kernel really computes: 4 matmuls per tile pair in dk/dv of two_pass, 3 in dq, 5 in one pass.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
from typing import Any

import torch

from dash_inductor.kernels.portable import standalone
from dash_inductor.model import AttentionSpec, Band, Mask, Plan, Site, Tiles

from . import common

DKDV = {
    128: ["64x128w8s2", "64x128w8s3", "32x128w8s3", "64x64w4s2", "32x64w4s3"],
    64: [
        "64x128w8s2",
        "64x128w8s3",
        "128x128w8s1",
        "128x128w8s2",
        "64x64w4s2",
        "64x64w4s3",
        "128x64w4s2",
        "32x128w8s3",
    ],
}
DQ = {
    128: ["128x64w8s2", "128x64w8s3", "128x128w8s2", "64x64w4s2", "64x64w4s3", "128x32w8s3", "64x128w4s2"],
    64: ["128x64w8s2", "128x64w8s3", "128x128w8s2", "64x64w4s2", "64x64w4s3", "128x64w4s3", "64x128w4s2", "256x64w8s2"],
}
ONE_PASS = {True: ["bent_fold", "spt", "descending"], False: ["ascending"]}
HEAD_CHUNKS = (1, 4, 16)


def site_of(head_dim: int, causal: bool, length: int) -> Site:
    """Returns a bf16 site with 16384 tokens and hidden size 2048."""
    heads = 2048 // head_dim
    mask = Band(0) if causal else Band()
    return Site(
        "cuda",
        "bfloat16",
        16384 // length,
        heads,
        heads,
        length,
        length,
        head_dim,
        head_dim,
        AttentionSpec(Mask(mask), head_dim**-0.5),
    )


def candidates(quick: bool) -> list[tuple[Site, Plan, int]]:
    """Lists (site, plan, index of the kernel to time in the rendered plan)."""
    jobs = []
    for head_dim in (128, 64):
        for causal in (False, True):
            site = site_of(head_dim, causal, 4096)
            some_dq, some_dkdv = Tiles.parse(DQ[head_dim][0]), Tiles.parse(DKDV[head_dim][0])
            head_chunks = HEAD_CHUNKS if causal else HEAD_CHUNKS[:1]
            for head_chunk in head_chunks:
                for tiles in DKDV[head_dim][: 2 if head_chunk > 1 else None]:
                    jobs.append(
                        (site, Plan("portable", "two_pass", "flash", Tiles.parse(tiles), some_dq, head_chunk), 1)
                    )
                for tiles in DQ[head_dim][: 2 if head_chunk > 1 else None]:
                    jobs.append(
                        (site, Plan("portable", "two_pass", "flash", some_dkdv, Tiles.parse(tiles), head_chunk), 0)
                    )
            for schedule in ONE_PASS[causal]:
                for head_chunk in (1, 4):
                    for tiles in DKDV[head_dim][:1] if quick else DKDV[head_dim][:3]:
                        jobs.append(
                            (site, Plan("portable", schedule, "flash", Tiles.parse(tiles), None, head_chunk), 1)
                        )
    return jobs


def _compile(job: tuple[Site, Plan, int]) -> str:
    site, plan, index = job
    try:
        standalone.compile_for(standalone.render(plan, site)[index], "sm_90")
    except Exception as e:  # a compiler crash is a property of one candidate
        return f"{type(e).__name__}: {e}"[:80]
    return ""


class Data:
    """The inputs of one site, its scale, the forward's outputs, and fp32 gradients of batch element 0, head 0."""

    def __init__(self, site: Site) -> None:
        assert site.batch
        assert site.q_len
        assert site.kv_len
        g = torch.Generator(device="cuda").manual_seed(0)
        shape = (site.batch, site.q_heads, site.q_len, site.head_dim)
        q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=g) for _ in range(4))
        causal, self.scale = not site.band.is_full, site.scale
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)[:2]
        self.tensors = {"Q": q, "K": k, "V": v, "DO": do, "OUT": out, "LSE": lse.contiguous()}
        self.tensors["DELTA"] = (out.float() * do.float()).sum(-1)
        self.tensors |= {n: torch.empty_like(q) for n in ("DQ_OUT", "DK_OUT", "DV")}
        self.tensors["DQ"] = torch.zeros(shape, device="cuda")
        self.tensors["ws_ptr"] = torch.zeros(
            1 + site.batch * site.q_heads * site.q_len // 16, dtype=torch.int32, device="cuda"
        )
        leaves = [t[:1, :1].float().requires_grad_() for t in (q, k, v)]
        s = (leaves[0] @ leaves[1].mT) * site.scale
        if causal:
            s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool, device="cuda").tril(), float("-inf"))
        self.reference = torch.autograd.grad(s.softmax(-1) @ leaves[2], leaves, do[:1, :1].float())


def run_one(data: Data, kernel: standalone.Rendered, compiled: Any, ordered: bool) -> dict[str, Any]:
    arguments = [data.tensors[n] for n in kernel.names]
    launch = compiled[(kernel.grid, 1, 1)]

    def call() -> None:
        if ordered:
            data.tensors["DQ"].zero_()
            data.tensors["ws_ptr"].zero_()
        launch(*arguments)

    call()
    torch.cuda.synchronize()
    errors = []
    for name, reference in zip(("DQ" if ordered else "DQ_OUT", "DK_OUT", "DV"), data.reference, strict=True):
        if name in kernel.names:
            got = data.tensors[name][:1, :1].float() * (1.0 if name != "DQ" else data.scale)
            errors.append(float((got - reference).norm() / reference.norm()))
    equal = ""
    if ordered:
        first = data.tensors["DQ"].clone()
        same = []
        for _ in range(5):
            call()
            same.append(torch.equal(first, data.tensors["DQ"]))
        equal = str(all(same))
    return {"error": max(errors), "equal": equal, "ms": common.time_ms(call, repeats=10)[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer one-pass candidates")
    parser.add_argument("--name", default="tiles", help="name of the results file")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    jobs = candidates(options.quick)
    with concurrent.futures.ProcessPoolExecutor(16, mp_context=multiprocessing.get_context("spawn")) as pool:
        failures = list(pool.map(_compile, jobs))  # fills Triton's disk cache
    rows, data, last = [], None, None
    for (site, plan, index), failure in zip(jobs, failures, strict=True):
        common.watchdog(60)
        if site != last:
            data, last = Data(site), site
        assert data is not None
        assert site.batch
        assert site.q_len
        kernel = standalone.render(plan, site)[index]
        row: dict[str, Any] = {"D": site.head_dim, "mask": str(site.band), "S": site.q_len, "schedule": plan.schedule}
        row |= {
            "kernel": "one pass" if plan.dq is None else ("dq", "dkdv")[index],
            "tiles": str(kernel.tiles),
            "head_chunk": plan.head_chunk,
        }
        if failure:
            rows.append(
                row | {"regs": failure, "spill": 0, "smem": 0, "error": 0.0, "equal": "", "ms": 0.0, "TFLOPs": 0.0}
            )
            continue
        compiled, used = standalone.compile_for(kernel, "sm_90")
        row |= {"regs": used.registers, "spill": used.spill_stores, "smem": used.shared_memory}
        if used.shared_memory > 227 * 1024:
            continue
        row |= run_one(data, kernel, compiled, plan.dq is None)
        matmuls = 5 if plan.dq is None else (3, 4)[index]
        flops = (
            matmuls * 2 * site.batch * site.q_heads * site.q_len**2 * site.head_dim * (1 if site.band.is_full else 0.5)
        )
        rows.append(row | {"TFLOPs": flops / row["ms"] / 1e9})
    common.table(rows)
    print(common.write(options.name, {"conditions": common.conditions(), "rows": rows}))


if __name__ == "__main__":
    main()
