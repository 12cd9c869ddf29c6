"""Run the portable kernels in Triton's interpreter, through Inductor: a program of its own, as it claims a GPU.

    python -m tests.support.interpreted_kernels SCHEDULE MASK Q_LEN KV_LEN GROUP DTYPE STATIC|DYNAMIC ...

Seven words per case; one line per case: the largest errors of dq, dk, dv against fp64, or the failed assertion.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from .mockgpu import install_driver  # Triton reads the environment when it is imported

install_driver()

import torch  # noqa: E402
import torch._inductor.config as inductor_config  # noqa: E402

from dash_inductor.schedule import Band, Plan, Tiles  # noqa: E402

from .attention import Problem, compiled_backward, errors  # noqa: E402


def run(schedule: str, mask: Band, q_len: int, kv_len: int, group: int, dtype: torch.dtype, dynamic: bool) -> str:
    torch._dynamo.reset()
    batch = 1 if group > 1 else 2  # programs run one after the other
    problem = Problem.random(q_len, kv_len, 24, mask, batch=batch, group=group, dtype=dtype, device="cpu")
    _, _, exact = problem.exact()
    out, lse = problem.rounded_forward()
    dq = Tiles(32, 16, 4, 1) if schedule == "two_pass" else None
    plan = Plan("portable", schedule, "reference", Tiles(16, 32, 4, 1), dq, section=3)
    backward = compiled_backward(mask, problem.scale, plan, dynamic=dynamic)
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
        schedule, mask, q_len, kv_len, group, dtype, lengths = words[i : i + 7]
        result = run(
            schedule, Band.parse(mask), int(q_len), int(kv_len), int(group), getattr(torch, dtype), lengths == "dynamic"
        )
        print("RESULT", result, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
