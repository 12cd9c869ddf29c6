"""Biases beside head dims above 128 on a GPU: every result against fp64, tiles of several shapes, and equal bits.

`python -m pytest -s` prints the largest error of every result and the time of a step, for the plan's tiles and others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor import lowering
from dash_inductor.model import Band, Plan, Tiles

from ..support.paired import PairedAttention, step
from ..support.portable_plans import portable_plan
from ..support.repeats import bits, differing_runs
from ..support.together import side_by_side
from .test_pairs import enough_programs

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
NAMES = "out", "dq", "dk", "dv", "dbias"
VARIANTS = {
    "planned": (None, None, None),
    "one stage": ("32x32w8s1", "32x32w8s1", None),
    "four warps": ("32x32w4s2", "32x32w4s2", None),
    "warpgroups": ("64x64w8s1", "64x32w4s1", None),
    "both kinds": (
        "32x64w8s2",
        "64x32w8s2",
        None,
    ),  # of matmuls, with loads ahead: Triton's code is wrong, see family.py
}
"""Tiles of dk/dv, dq and the forward; None: the plan's."""
CASES: list[tuple[int, torch.dtype, Band, int, int, int, dict[str, Any]]] = [
    (192, FP16, Band(), 130, 190, 1, {"bias": "bqk:infinite", "keys": True}),
    (256, BF16, Band(0), 255, 255, 2, {"bias": "hqk:random"}),
    (136, BF16, Band(), 200, 300, 1, {"bias": "qk:lowest", "drops": 0.1}),
    (160, FP16, Band(-60, 80), 300, 200, 2, {"bias": "hk:random", "dense": "b1"}),
    (256, FP16, Band(), 129, 257, 1, {"bias": "hqk:random", "drops": 0.5, "keys": True}),
    (192, BF16, Band(0, None, "bottom_right"), 100, 300, 1, {"dense": "bhqk"}),
]


@pytest.fixture(scope="module", autouse=True)
def compiled_side_by_side() -> Iterator[None]:
    lowering.register()
    with side_by_side():
        yield


def problems(cases: Sequence[Any] = CASES) -> list[PairedAttention]:
    return [
        PairedAttention.random(
            q_len, kv_len, band, dim=dim, dtype=dtype, group=group, scale=dim**-0.5, device="cuda", **data
        )
        for dim, dtype, band, q_len, kv_len, group, data in cases
    ]  # fmt: skip


def planned(p: PairedAttention, variant: str = "planned", schedule: str = "two_pass") -> Plan:
    plan = portable_plan(p.site(), "sm_{}{}".format(*torch.cuda.get_device_capability()), schedule)
    dkdv, dq, forward = (tiles and Tiles.parse(tiles) for tiles in VARIANTS[variant])
    return replace(
        plan, dkdv=dkdv or plan.dkdv, dq=plan.dq and (dq or plan.dq), forward_tiles=forward or plan.forward_tiles
    )


def compiled(given: Sequence[PairedAttention], plans: Sequence[Plan], *, dynamic: bool = False) -> Any:
    """`paired.step` of all problems as one graph: a function of nothing that gives their results."""
    facts = [
        ((str(p.call(1)), str(p.call(3, gradient=p.bias is not None))), str(plan), None if p.bias is None else p.summed)
        for p, plan in zip(given, plans, strict=True)
    ]

    def together(tensors: list[Any]) -> list[tuple[Tensor, ...]]:
        return [step(*of, *fact) for of, fact in zip(tensors, facts, strict=True)]

    tensors = []
    for p in given:
        of = [t.detach() for t in (p.q, p.k, p.v, p.do)]
        for t in of if dynamic else ():
            torch._dynamo.maybe_mark_dynamic(t, 2)
        tensors.append((*of, [t.detach() for t in p.extras]))
    torch._dynamo.reset()
    function = torch.compile(together, dynamic=False, fullgraph=True)
    return lambda: function(tensors)


def errors(p: PairedAttention, results: Sequence[Tensor]) -> dict[str, float]:
    """The errors of every result relative to its norm, not a number where one is not finite."""
    out, gradients, sees = p.exact()
    assert (results[0][~sees] == 0).all()
    found = [*results[:4], *(p.reduced(t) for t in results[4:])]
    exact = (out, *gradients)
    return {
        name: float((a.double() - b).norm() / b.norm()) if a.isfinite().all() else float("nan")
        for name, a, b in zip(NAMES, found, exact, strict=False)
    }


def allowed(p: PairedAttention) -> float:
    return 8 * torch.finfo(p.q.dtype).eps


def milliseconds(call: Any) -> float:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 200


@pytest.mark.parametrize("variant", VARIANTS)
def test_values(variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the plan's tiles have to be right; what others give is printed."""
    given = problems()
    if variant != "planned":
        given = given[:4]
    try:
        plans = [planned(p, variant) for p in given]
        results = compiled(given, plans)()
        large = PairedAttention.random(
            2048, 2048, Band(), dim=256, dtype=BF16, batch=4, group=16, scale=1 / 16, device="cuda", bias="hqk:random"
        )
        took = milliseconds(compiled([large], [planned(large, variant)]))
    except Exception as error:
        if variant == "planned":
            raise
        with capsys.disabled():
            print(f"\n{variant}: {type(error).__name__} {str(error)[:300]}")
        return
    with capsys.disabled():
        print(f"\n{variant} {plans[0]}: a step of 4 x 16 heads of 2048, D=256: {took:.2f} ms")
        for p, of in zip(given, results, strict=True):
            print("  ", p.q.shape[3], p.q.dtype, {name: f"{e:.1e}" for name, e in errors(p, of).items()}, p.call(0))
    if variant == "planned":
        for p, of in zip(given, results, strict=True):
            assert max(errors(p, of).values()) <= allowed(p), (p.call(0), errors(p, of))


def test_the_gradient_of_a_bias_by_a_kernel_of_its_own() -> None:
    given = problems()[:3]
    found = []
    for number in (1, 1 << 30):
        with enough_programs(number):
            found.append(compiled(given, [planned(p) for p in given])())
    for p, ours, others in zip(given, *found, strict=True):
        assert max(errors(p, others).values()) <= allowed(p), (p.call(0), errors(p, others))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, others, strict=True)), p.call(0)


def test_one_pass() -> None:
    given = problems()[:4]
    for p, of in zip(given, compiled(given, [planned(p, schedule="spt") for p in given])(), strict=True):
        assert max(errors(p, of).values()) <= allowed(p), (p.call(0), errors(p, of))


@pytest.mark.parametrize("how", [{}, {"load": True}, {"poisoned": True}], ids=["idle", "load", "poisoned"])
def test_bits(how: dict[str, bool]) -> None:
    """The same in every run, and of lengths that the graph does not know."""
    given = problems()
    plans = [planned(p, schedule="spt" if i % 2 else "two_pass") for i, p in enumerate(given)]
    call = compiled(given, plans)
    assert differing_runs(lambda: [t for results in call() for t in results], 30, **how) == 0
    if not how:
        for a, b in zip(call(), compiled(given, plans, dynamic=True)(), strict=True):
            assert all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))
