"""Attention backward beside what a user would pick instead, in one run on one GPU.

    python -m benchmarks.backward [--tokens 16384] [--hidden 2048] [--name backward]

One call from saved tensors to bf16 gradients, pre- and post-processing included.  Columns: PyTorch's deterministic FA2
(`use_deterministic_algorithms`), cuDNN (not deterministic), compiled FlexAttention (Triton), and the compiled
`dash::attention_backward` with the planner's plan.  TFLOP/s = 2.5 * 4 * B * H * S * S * D (half if causal) / time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from dash_inductor import ops
from dash_inductor.schedule import plan as make_plan
from dash_inductor.schedule.problem import Band, Plan, Site

from . import common

aten = torch.ops.aten
Backward = Callable[[], Any]


class Problem:
    """Inputs of one shape and the forward's outputs, in PyTorch's layout [batch, heads, length, head dim]."""

    def __init__(self, tokens: int, hidden: int, head_dim: int, length: int, causal: bool) -> None:
        self.batch, self.heads, self.length, self.head_dim = tokens // length, hidden // head_dim, length, head_dim
        self.causal, self.scale = causal, head_dim**-0.5
        g = torch.Generator(device="cuda").manual_seed(0)
        shape = (self.batch, length, self.heads, head_dim)
        self.q, self.k, self.v, self.do = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=g).transpose(1, 2) for _ in range(4)
        )
        self.mask = Band(0) if causal else Band()

    @property
    def flops(self) -> float:
        return 2.5 * 4 * self.batch * self.heads * self.length**2 * self.head_dim * (0.5 if self.causal else 1.0)

    def site(self) -> Site:
        return Site(
            "cuda", "bfloat16", self.batch, self.heads, self.heads, self.length, self.length,
            self.head_dim, self.head_dim, self.mask, self.scale,
        )  # fmt: skip


def flash(p: Problem) -> Backward:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        p.q, p.k, p.v, 0.0, p.causal, False, scale=p.scale
    )
    return lambda: aten._scaled_dot_product_flash_attention_backward(
        p.do, p.q, p.k, p.v, out, lse, None, None, p.length, p.length, 0.0, p.causal, seed, offset, scale=p.scale
    )


def cudnn(p: Problem) -> Backward:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        p.q, p.k, p.v, None, True, 0.0, p.causal, False, scale=p.scale
    )
    return lambda: aten._scaled_dot_product_cudnn_attention_backward(
        p.do, p.q, p.k, p.v, out, lse, seed, offset, None, None, None, p.length, p.length, 0.0, p.causal, scale=p.scale
    )


def flex(p: Problem) -> Backward:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    leaves = [t.detach().requires_grad_() for t in (p.q, p.k, p.v)]
    mask = None
    if p.causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, p.length, p.length, device="cuda")
    out = torch.compile(flex_attention, dynamic=False)(*leaves, block_mask=mask)
    return lambda: torch.autograd.grad(out, leaves, p.do, retain_graph=True)


def dash(p: Problem, plan: Plan) -> Backward:
    order = [0, 2, 1, 3]

    def backward(*tensors: torch.Tensor) -> Any:
        return ops.attention_backward(*tensors, str(p.mask), p.scale, order, order, order, str(plan), "benchmark")

    out, lse = ops.attention_forward(p.q, p.k, p.v, str(p.mask), p.scale, order, str(plan), "benchmark")
    compiled = torch.compile(backward, dynamic=False)
    return lambda: compiled(p.do, p.q, p.k, p.v, out, lse)


def measure(p: Problem, arch: str) -> dict[str, Any]:
    plan = make_plan(p.site(), arch)
    row: dict[str, Any] = {"D": p.head_dim, "mask": str(p.mask), "S": p.length}
    contenders = {"FA2 det": flash, "cuDNN nondet": cudnn, "flex": flex, "dash": lambda x: dash(x, plan)}
    gradients = {}
    for name, build in contenders.items():
        common.watchdog(90)
        torch.use_deterministic_algorithms(name in ("FA2 det", "dash"))
        run = build(p)
        gradients[name] = run()
        if name == "dash":
            row["equal"] = all(all(map(torch.equal, gradients[name], run())) for _ in range(10))
        row[name] = p.flops / common.time_ms(run, repeats=15) / 1e9
    torch.use_deterministic_algorithms(False)
    errors = [
        float((ours.float() - theirs.float()).norm() / theirs.float().norm())
        for ours, theirs in zip(gradients["dash"], gradients["FA2 det"], strict=True)
    ]
    row |= {
        "vs FA2 det": row["dash"] / row["FA2 det"],
        "vs cuDNN": row["dash"] / row["cuDNN nondet"],
        "vs flex": row["dash"] / row["flex"],
    }
    return row | {"difference to FA2": max(errors), "plan": str(plan)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--name", default="backward", help="name of the results file")
    options = parser.parse_args()
    from dash_inductor import lowering

    lowering.register()
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    rows = []
    for head_dim in (128, 64):
        for causal in (False, True):
            for length in (512, 1024, 2048, 4096, 8192, 16384):
                torch._dynamo.reset()
                rows.append(measure(Problem(options.tokens, options.hidden, head_dim, length, causal), arch))
                print(rows[-1], flush=True)
    common.table([{k: v for k, v in row.items() if k != "plan"} for row in rows])
    print(common.write(options.name, {"conditions": common.conditions(), "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
