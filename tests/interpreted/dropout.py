"""Run the portable kernels with dropout in Triton's interpreter, through Inductor.

    python -m tests.interpreted.dropout SCHEDULE MASK Q_LEN KV_LEN GROUP DTYPE P MODE ...

A program of its own, as it claims a GPU.  MODE: static, dynamic, keys, segments or seeds.  Eight words per case, one
line of output each: the largest errors of out, log-sum-exp, dq, dk and dv against fp64 with what was kept.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from ..support.mockgpu import install_driver  # Triton reads the environment when it is imported

install_driver()

from dataclasses import replace  # noqa: E402

import torch  # noqa: E402
import torch._inductor.config as inductor_config  # noqa: E402

from dash_inductor import lowering  # noqa: E402
from dash_inductor.model import Band, Dropout, Operand, Plan, Tiles  # noqa: E402

from ..support import keyed  # noqa: E402
from ..support.dropout import exact, kept_pairs  # noqa: E402
from ..support.keyed import KeyedAttention  # noqa: E402

FORWARD = Tiles(32, 16, 4, 1)


def run(p: KeyedAttention, schedule: str, dropout: Dropout, seed: torch.Tensor, dynamic: bool) -> list[float]:
    torch._dynamo.reset()
    dq = Tiles(32, 16, 4, 1) if schedule == "two_pass" else None
    plan = Plan("portable", schedule, "portable", Tiles(16, 32, 4, 1), dq, head_chunk=3, forward_tiles=FORWARD)
    extras = [*(t.detach() for t in p.extras), seed]
    forward, backward = (str(replace(p.spec(results), dropout=dropout)) for results in (1, 3))
    tensors = [p.q, p.k, p.v]
    if dynamic:
        for t in (*tensors, p.do):
            torch._dynamo.mark_dynamic(t, 2)
    out, lse = torch.compile(keyed.attend, dynamic=False)(*tensors, extras, forward, plan)
    if dynamic:
        for t in (out, lse):
            torch._dynamo.mark_dynamic(t, 2)
    gradients = torch.compile(keyed.gradients, dynamic=False)(p.do, *tensors, out, lse, extras, backward, plan)
    kept = kept_pairs(dropout, seed, *p.q.shape[:3], p.k.shape[2])
    wanted = exact((p.q, p.k, p.v), p.do, p.keep()[:, None], kept, dropout, p.scale)
    finite = wanted[1].isfinite()
    assert torch.equal(finite, lse.isfinite())
    pairs = [(out, wanted[0]), (lse[finite], wanted[1][finite]), *zip(gradients, wanted[2], strict=True)]
    return [float((ours - true).abs().max() / true.abs().max()) for ours, true in pairs]


def main(words: list[str]) -> None:
    inductor_config.cpu_backend = "triton"
    lowering.register()
    for i in range(0, len(words), 8):
        schedule, mask, q_len, kv_len, group, dtype, p, mode = words[i : i + 8]
        problem = KeyedAttention.random(
            int(q_len), int(kv_len), Band.parse(mask), kv_heads=2, group=int(group), dtype=getattr(torch, dtype),
            valid="holes" if mode == "keys" else "all", documents="sorted" if mode == "segments" else "none",
        )  # fmt: skip
        seeds = [0, -1, -(2**63)] if mode == "seeds" else [0x0123456789ABCDEF]
        dropout = Dropout(float(p), Operand(len(problem.extras)))
        found = [run(problem, schedule, dropout, torch.tensor([seed]), mode == "dynamic") for seed in seeds]
        print("RESULT", " ".join(f"{max(errors):.1e}" for errors in zip(*found, strict=True)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
