"""Run the portable kernels with ALiBi slopes and lengths that differ in Triton's interpreter, through Inductor.

    python -m tests.interpreted.slopes CASE ...

A program of its own, as it claims a GPU.  A case is MASK;Q_LEN;KV_LEN;BATCH OF SLOPES;SCHEDULE; one line of output per
case: the largest errors of the output and of the gradients.
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
from dash_inductor.model import AttentionSpec, Mask, Operand, Plan, Tiles  # noqa: E402

from ..support.paired import step  # noqa: E402
from ..support.slopes import exact  # noqa: E402

TILES = Tiles(32, 16, 4, 1)
BATCH, Q_HEADS, KV_HEADS, DIM = 2, 2, 1, 16


def run(mask: str, q_len: int, kv_len: int, slopes_batch: int, schedule: str) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = [(Q_HEADS, q_len), (KV_HEADS, kv_len), (KV_HEADS, kv_len), (Q_HEADS, q_len)]
    tensors = [torch.randn(BATCH, heads, length, DIM) for heads, length in sizes]
    slopes = torch.rand(slopes_batch, Q_HEADS)
    spec, order = AttentionSpec(Mask.parse(mask), 0.25, slopes=Operand(0)), (0, 1, 2, 3)
    calls = str(replace(spec, orders=(order,))), str(replace(spec, orders=(order,) * 3))
    dq = TILES if schedule == "two_pass" else None
    plan = str(Plan("portable", schedule, "portable", Tiles(16, 32, 4, 1), dq, head_chunk=3, forward_tiles=TILES))
    found = torch.compile(step, dynamic=False)(*[t.clone() for t in tensors], [slopes.clone()], calls, plan)
    right = exact(tensors, slopes, spec.mask.band, 0.25)
    return " ".join(f"{float((a - b).abs().max()):.1e}" for a, b in zip(found, right, strict=True))


def main(cases: list[str]) -> None:
    inductor_config.cpu_backend = "triton"
    lowering.register()
    for case in cases:
        mask, q_len, kv_len, slopes_batch, schedule = case.split(";")
        print("RESULT", case, run(mask, int(q_len), int(kv_len), int(slopes_batch), schedule), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
