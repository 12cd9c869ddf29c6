"""Run the portable kernels with dense masks, biases and dropout beside them in Triton's interpreter, through Inductor.

    python -m tests.interpreted.pairs CASE ...

A program of its own, as it claims a GPU.  A case is MODE,SCHEDULE,BAND,Q_LEN,KV_LEN,GROUP,DTYPE,SCALE,DENSE,BIAS,KEYS
and perhaps the probability of dropout and the head dim of values; one line of output per case.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from ..support.mockgpu import install_driver  # Triton reads the environment when it is imported

install_driver()

from collections.abc import Callable, Iterable, Iterator  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import torch  # noqa: E402
import torch._inductor.config as inductor_config  # noqa: E402
from torch import Tensor  # noqa: E402

from dash_inductor import lowering  # noqa: E402
from dash_inductor.lowering import backward  # noqa: E402
from dash_inductor.model import Band, Plan, Tiles  # noqa: E402

from ..support.paired import PairedAttention, step  # noqa: E402

TILES = Tiles(32, 16, 4, 1)


def run(p: PairedAttention, schedule: str, **options: bool) -> tuple[Tensor, ...]:
    """Output and gradients, compiled anew; options as for `steps`."""
    (results,) = steps([p], schedule, **options)
    return results


def steps(
    problems: Iterable[PairedAttention],
    schedule: str,
    *,
    dynamic: bool = False,
    computed: bool = False,
    apart: bool = False,
) -> Iterator[tuple[Tensor, ...]]:
    """Output and gradients of problems that differ in their values alone: what is compiled for one is run for all.

    Args:
        apart: a kernel of its own makes the bias's gradient, as where the dq kernel would have too few programs.
    """
    torch._dynamo.reset()
    function = torch.compile(computed_step if computed else step, dynamic=False)
    dq = TILES if schedule == "two_pass" else None
    plan = str(Plan("portable", schedule, "portable", Tiles(16, 32, 4, 1), dq, head_chunk=3, forward_tiles=TILES))
    for p in problems:
        tensors = [t.clone(memory_format=torch.preserve_format) for t in (p.q, p.k, p.v, p.do)]
        extras = [t.clone(memory_format=torch.preserve_format) for t in p.extras]
        if computed:
            extras = [~t if t.dtype == torch.bool else -t for t in extras]
        if dynamic:
            for t in tensors:
                torch._dynamo.mark_dynamic(t, 2)
            for t in extras:
                for dim in range(1, t.dim()):
                    if t.shape[dim] in p.plane[2:]:
                        torch._dynamo.maybe_mark_dynamic(t, dim)
        calls = str(p.spec(1)), str(p.spec(3, gradient=p.bias is not None))
        enough = mock.patch.object(backward, "ENOUGH_PROGRAMS", 1 << 30 if apart else 1)
        with enough, inductor_config.patch(force_disable_caches=True):  # no cache knows of the number
            results: tuple[Tensor, ...] = function(*tensors, extras, calls, plan)
        yield results


def computed_step(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, extras: list[Tensor], *more: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `step`, of operands that the graph computes, of which some are views."""
    operands = [~t if t.dtype == torch.bool else -t for t in extras]
    return step(q, k, v, do, [t.mT.contiguous().mT if t.dim() == 4 else t for t in operands], *more)


def exact(p: PairedAttention, schedule: str) -> str:
    """The largest errors; what belongs to rows without keys and to keys without rows is zero."""
    out, gradients, sees = p.exact()
    got = run(p, schedule)
    assert (got[0][~sees] == 0).all(), "a row without keys is not zero"
    assert (got[1][~sees] == 0).all(), "a row without keys has a gradient"
    _, keys = p.looked_at()
    assert all((gradient[~keys] == 0).all() for gradient in got[2:4]), "a key without rows has a gradient"
    found = [*got[:4], *(() if p.bias is None else (p.reduced(got[4]),))]
    return " ".join(f"{float((a - b).abs().max()):.1e}" for a, b in zip(found, (out, *gradients), strict=True))


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...], what: object) -> None:
    equal = [torch.equal(x, y) for x, y in zip(a, b, strict=True)]
    assert all(equal), f"other bits: {what} {equal}"


def poison(p: PairedAttention, schedule: str) -> str:
    """Rows and keys that nobody sees may hold anything."""
    fills = float("nan"), float("inf")
    expected, *others = steps([p.surrounded(fill) for fill in (0.0, *fills)], schedule)
    assert all(t.isfinite().all() for t in expected)
    for fill, got in zip(fills, others, strict=True):
        same(expected, got, fill)
    return "unharmed"


def dynamic(p: PairedAttention, schedule: str) -> str:
    same(run(p, schedule), run(p, schedule, dynamic=True), "dynamic")
    return "equal"


def of_the_graph(p: PairedAttention, schedule: str) -> str:
    same(run(p, schedule), run(p, schedule, computed=True), "operands that the graph computes")
    return "equal"


def ways(p: PairedAttention, schedule: str) -> str:
    same(run(p, schedule), run(p, schedule, apart=True), "the bias's gradient by a kernel of its own")
    return "equal"


def one(p: PairedAttention, schedule: str) -> str:
    """A batch element alone has the bits that it has in a batch; the gradient of a bias is a sum over the batch."""
    results = run(p, schedule)
    for b in range(len(p.q)):
        at = slice(b, b + 1)

        def of(t: Tensor | None, at: slice = at) -> Tensor | None:
            return t if t is None or len(t) == 1 else t[at]

        q, k, v, do = (t[at] for t in (p.q, p.k, p.v, p.do))
        alone = PairedAttention(q, k, v, do, p.band, p.scale, of(p.dense), of(p.bias), of(p.keys))
        same(tuple(t[at] for t in results[:4]), run(alone, schedule)[:4], f"element {b} alone")
    return "equal"


MODES: dict[str, Callable[[PairedAttention, str], str]] = {
    "exact": exact, "poison": poison, "dynamic": dynamic, "computed": of_the_graph, "one": one,
    "ways": ways,
}  # fmt: skip


def main(cases: list[str]) -> None:
    inductor_config.cpu_backend = "triton"
    lowering.register()
    for case in cases:
        mode, schedule, band, q_len, kv_len, group, dtype, scale, dense, bias, keys, *more = case.split(",")
        p = PairedAttention.random(
            int(q_len), int(kv_len), Band.parse(band.replace(";", ",")), dense=dense, bias=bias, keys=keys == "keys",
            group=int(group), dtype=getattr(torch, dtype), scale=float(scale),
            drops=float(more[0]) if more else 0.0, value_dim=int(more[1]) if more[1:] else None,
        )  # fmt: skip
        try:
            result = MODES[mode](p, schedule)
        except AssertionError as error:
            result = f"failed: {error}"
        print("RESULT", result, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
