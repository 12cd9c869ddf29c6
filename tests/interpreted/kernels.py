"""Run the portable kernels in Triton's interpreter, through Inductor: a program of its own, as it claims a GPU.

    python -m tests.interpreted.kernels SCHEDULE MASK Q_LEN KV_LEN GROUP DTYPE MODE ...

MODE: static, dynamic, poison or overflow.  Seven words per case; one line per case: the largest errors of dq, dk, dv
against fp64, or that programs were out of order; with poison and overflow "unharmed", if the checks of `poison` hold.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from ..support.mockgpu import install_driver  # Triton reads the environment when it is imported

install_driver()

import torch  # noqa: E402
import torch._inductor.config as inductor_config  # noqa: E402

from dash_inductor.model import Band, Plan, Tiles  # noqa: E402

from ..support.attention import Attention, Gradients, compiled_backward, errors  # noqa: E402
from ..support.poison import check_overflow, check_poison  # noqa: E402


def run(schedule: str, mask: Band, q_len: int, kv_len: int, group: int, dtype: torch.dtype, mode: str) -> str:
    torch._dynamo.reset()
    harm = {"poison": check_poison, "overflow": check_overflow}.get(mode)
    batch = 1 if group > 1 or harm else 2  # programs run one after the other
    problem = Attention.random(
        q_len, kv_len, 24, mask, batch=batch, kv_heads=1 if harm else 2, group=group, dtype=dtype, device="cpu"
    )
    dq = Tiles(32, 16, 4, 1) if schedule == "two_pass" else None
    plan = Plan("portable", schedule, "keep", Tiles(16, 32, 4, 1), dq, head_chunk=3)
    backward = compiled_backward(mask, problem.scale, plan, dynamic=mode == "dynamic")
    if harm is not None:

        def of(p: Attention, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
            return backward(p.do, p.q, p.k, p.v, out, lse)

        harm(problem, of)
        return "unharmed"
    _, _, exact = problem.exact()
    out, lse = problem.rounded_forward()
    try:
        gradients = backward(problem.do, problem.q, problem.k, problem.v, out, lse)
    except Exception as error:
        if "Assume failed" not in repr(error) + repr(error.__cause__):
            raise
        return "accumulation out of order"
    assert [g.stride() for g in gradients] == [t.stride() for t in (problem.q, problem.k, problem.v)]
    return " ".join(f"{e:.1e}" for e in errors(gradients, exact))


def main(words: list[str]) -> None:
    inductor_config.cpu_backend = "triton"
    for i in range(0, len(words), 7):
        schedule, mask, q_len, kv_len, group, dtype, mode = words[i : i + 7]
        result = run(schedule, Band.parse(mask), int(q_len), int(kv_len), int(group), getattr(torch, dtype), mode)
        print("RESULT", result, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
