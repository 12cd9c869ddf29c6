"""Run the portable kernels under intervals of keys and bounded scores in Triton's interpreter, through Inductor.

    python -m tests.interpreted.scores CASE ...

A program of its own, as it claims a GPU.  A case is CALL,SCHEDULE,DTYPE, where CALL is the text of a call without
orders, of `EXTRAS`; one line of output per case: the largest errors of the output and of the gradients.
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
from torch import Tensor  # noqa: E402

from dash_inductor import lowering  # noqa: E402
from dash_inductor.model import AttentionSpec, Plan, Tiles  # noqa: E402
from dash_inductor.operators import attention as ops  # noqa: E402

from ..support.paired import step  # noqa: E402

TILES = Tiles(32, 16, 4, 1)
BATCH, Q_HEADS, KV_HEADS, LENGTH, DIM = 2, 2, 1, 70, 16


def extras(names: str) -> list[Tensor]:
    """The operands of a call, by one letter each: bounds l and u of positions, and L and U by head, numbers n, ids i,
    pairs d, a bias b, a gradient g of the log-sum-exp and sinks r of rows, with strides of their own, sinks h of heads,
    ALiBi slopes s of heads, and S of heads of each batch element, positions p of queries from -30 on, and steps e of
    dilations.
    """
    generator = torch.Generator().manual_seed(0)
    lower = torch.randint(-3, LENGTH, (BATCH, LENGTH), generator=generator)
    found = {
        "l": lower,
        "L": torch.randint(-3, LENGTH, (BATCH, Q_HEADS, LENGTH, 1), generator=torch.Generator().manual_seed(3)),
        "U": torch.randint(9, LENGTH, (1, Q_HEADS, 1, 1), generator=torch.Generator().manual_seed(4)).int(),
        "u": (lower + torch.randint(-3, 40, lower.shape, generator=generator)).int(),
        "n": torch.randint(0, 9, lower.shape, generator=generator),
        "i": (torch.arange(LENGTH) // 20).expand(BATCH, -1).contiguous(),
        "d": torch.rand(BATCH, 1, LENGTH, LENGTH, generator=generator).expand(-1, Q_HEADS, -1, -1) < 0.5,
        "b": torch.randn(BATCH, Q_HEADS, LENGTH, LENGTH, generator=generator),
        "g": torch.randn(BATCH, LENGTH, Q_HEADS, generator=generator).transpose(1, 2),
        "r": 3 * torch.randn(BATCH, LENGTH, Q_HEADS, generator=generator).transpose(1, 2),
        "p": torch.arange(-30, LENGTH - 30, dtype=torch.int32).expand(BATCH, -1),
        "e": torch.tensor([1, 2, 3, 64, 100, 0, -3])[torch.randint(0, 7, lower.shape, generator=generator)],
        "s": torch.rand(1, Q_HEADS, generator=torch.Generator().manual_seed(1)),
        "S": torch.rand(Q_HEADS, BATCH, generator=torch.Generator().manual_seed(2)).T,
        "h": torch.randn(1, Q_HEADS, 1, generator=generator),
    }
    return [found[name] for name in names]


def shown(spec: AttentionSpec, given: list[Tensor]) -> Tensor:
    q, kv = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    band = spec.mask.band
    keep = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    keep = keep & (band.lo is None or q - kv >= band.lo) & (band.hi is None or q - kv <= band.hi)
    for component in spec.mask.components.values():
        values = {
            field: _placed(given[operand.index], component.AXES[field]) for field, operand in component.given.items()
        }
        keep = keep & component.shows(values, kv)
    return keep


def _placed(given: Tensor, axes: tuple[str, ...]) -> Tensor:
    """An operand of a component with the dimensions of the scores."""
    if given.dim() == 4:
        return given
    return given[:, None, :, None] if "q" in axes else given[:, None, None]


def exact(spec: AttentionSpec, tensors: list[Tensor], given: list[Tensor]) -> list[Tensor]:
    q, k, v, do = (t.double() for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    keep = shown(spec, given)
    s = q @ k.expand(-1, Q_HEADS, -1, -1).mT * spec.scale
    s = s if spec.softcap is None else spec.softcap * torch.tanh(s / spec.softcap)
    s = s if spec.bias is None else s + given[spec.bias.operand.index].double()
    if spec.slopes is not None:
        positions = torch.arange(LENGTH)
        s = s - given[spec.slopes.index].double()[..., None, None] * (positions[:, None] - positions).abs()
    sees = keep.any(-1, keepdim=True)
    s = torch.where(keep | ~sees, s, float("-inf"))
    column = s.new_zeros(0) if spec.sinks is None else given[spec.sinks.index].double()[..., None]
    if spec.sinks is not None:
        leaves.append(column.expand(*s.shape[:3], -1).clone().requires_grad_())
        column = leaves[3]
    p = torch.cat([s, column] if spec.sinks is not None else [s], -1).softmax(-1)[..., :LENGTH]
    out = torch.where(sees, p, 0.0) @ v.expand(-1, Q_HEADS, -1, -1)
    if spec.grad_logsumexp is None:
        return [out.detach(), *torch.autograd.grad(out, leaves, do)]
    sums = torch.where(sees[..., 0], torch.logsumexp(s, -1), 0.0)
    return [out.detach(), *torch.autograd.grad((out, sums), leaves, (do, given[spec.grad_logsumexp.index].double()))]


def step_with_delta(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, extras: list[Tensor], calls: tuple[str, str], plan: str
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv, delta and the log-sum-exp: to be compiled."""
    out, lse = ops.attention_forward(q, k, v, extras, calls[0], plan, "test")
    return (out, *ops.attention_backward(do, q, k, v, out, lse, extras, calls[1], plan, "test"), lse)


def run(text: str, names: str, schedule: str, dtype: torch.dtype) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    spec, given = AttentionSpec.parse(text), extras(names)
    tensors = [2 * torch.randn(BATCH, h, LENGTH, DIM, dtype=dtype) for h in (Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS)]
    order = (0, 1, 2, 3)
    of_sinks = spec.sinks is not None and not spec.traits.biased
    of_backward = replace(spec.of_backward, orders=(order,) * 3, delta=of_sinks)
    calls = str(replace(spec.of_forward, orders=(order,))), str(of_backward)
    dq = TILES if schedule == "two_pass" else None
    plan = str(Plan("portable", schedule, "portable", Tiles(16, 32, 4, 1), dq, head_chunk=3, forward_tiles=TILES))
    compiled = torch.compile(step_with_delta if of_sinks else step, dynamic=False)
    found = compiled(*[t.clone() for t in tensors], [t.clone() for t in given], calls, plan)
    if of_sinks and spec.sinks is not None:
        *others, delta, lse = found
        found = (*others, -((given[spec.sinks.index] - lse).exp() * delta)[..., None])
    right = exact(spec, tensors, given)[: len(found)]
    return " ".join(f"{float((a - b).abs().max()):.1e}" for a, b in zip(found, right, strict=True))


def main(cases: list[str]) -> None:
    inductor_config.cpu_backend = "triton"
    lowering.register()
    for case in cases:
        text, names, schedule, dtype = case.split(";")
        print("RESULT", case, run(text, names, schedule, getattr(torch, dtype)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
