"""Biases beside head dims above 128, and beside values of another head dim, on a GPU: every result, and its bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor import lowering, sites
from dash_inductor.config import config
from dash_inductor.kernels.reference import backward as reference
from dash_inductor.kernels.reference import forward as reference_forward
from dash_inductor.model import Band, Plan

from ..support.paired import PairedAttention, step
from ..support.portable_plans import portable_plan
from ..support.repeats import bits, differing_runs
from ..support.together import side_by_side

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
NAMES = "out", "dq", "dk", "dv", "dbias"
CASES: list[tuple[int, torch.dtype, Band, int, int, int, dict[str, Any]]] = [
    (192, FP16, Band(), 130, 190, 1, {"bias": "bqk:infinite", "keys": True}),
    (256, BF16, Band(0), 255, 255, 2, {"bias": "hqk:random"}),
    (192, BF16, Band(), 200, 300, 1, {"bias": "qk:lowest", "drops": 0.1, "value_dim": 128}),
    (136, FP16, Band(-60, 80), 300, 200, 2, {"bias": "hk:random", "dense": "b1"}),
    (64, BF16, Band(0), 130, 130, 1, {"bias": "hqk:random", "value_dim": 128}),
]


@pytest.fixture(scope="module", autouse=True)
def compiled_side_by_side() -> Iterator[None]:
    lowering.register()
    with side_by_side():
        yield


@pytest.fixture(autouse=True)
def nothing_but_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators' eager kernels would give the right values too: they must not run here."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("the reference executor ran in place of a kernel")

    for module, name in ((reference_forward, "forward"), (reference, "backward"), (reference, "bias_gradient")):
        monkeypatch.setattr(module, name, refuse)


def problems(cases: Sequence[Any] = CASES) -> list[PairedAttention]:
    return [
        PairedAttention.random(
            q_len, kv_len, band, dim=dim, dtype=dtype, group=group, scale=dim**-0.5, device="cuda", **data
        )
        for dim, dtype, band, q_len, kv_len, group, data in cases
    ]  # fmt: skip


def planned(p: PairedAttention, schedule: str) -> Plan:
    return portable_plan(p.site(), "sm_{}{}".format(*torch.cuda.get_device_capability()), schedule)


def compiled(given: Sequence[PairedAttention], plans: Sequence[Plan], *, dynamic: bool = False) -> Any:
    """`paired.step` of all problems as one graph: a function of nothing that gives their results."""
    facts = [
        ((str(p.spec(1)), str(p.spec(3, gradient=p.bias is not None))), str(plan))
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


def check(p: PairedAttention, results: Sequence[Tensor]) -> None:
    out, gradients, sees = p.exact()
    assert (results[0][~sees] == 0).all()
    found = [*results[:4], *(p.reduced(t) for t in results[4:])]
    errors = {
        name: float((a.double() - b).norm() / b.norm())
        for name, a, b in zip(NAMES, found, (out, *gradients), strict=True)
    }
    assert all(error <= 4 * torch.finfo(p.q.dtype).eps for error in errors.values()), (p.spec(0), errors)


def test_values_and_bits() -> None:
    """The same in every run, under load and with poisoned memory."""
    given = problems()
    spec = compiled(given, [planned(p, "two_pass") for p in given])
    for p, results in zip(given, spec(), strict=True):
        check(p, results)
    for how in ({}, {"load": True}, {"poisoned": True}):
        assert differing_runs(lambda: [t for results in spec() for t in results], 30, **how) == 0


def test_one_pass_and_a_kernel_of_the_gradient() -> None:
    given = problems(CASES[:3])
    spec = compiled(given, [planned(p, "spt") for p in given])
    for p, results in zip(given, spec(), strict=True):
        check(p, results)
    assert differing_runs(lambda: [t for results in spec() for t in results], 30, load=True) == 0


def test_dynamic_lengths_have_the_bits_of_static_ones() -> None:
    given = problems(CASES[1:3])
    plans = [planned(p, "two_pass") for p in given]
    for a, b in zip(compiled(given, plans)(), compiled(given, plans, dynamic=True)(), strict=True):
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def test_a_program(deterministic: None) -> None:
    """A learned bias of a head dim of 256, in memory as models have it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 200, 256, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    table = torch.randn(1, 4, 200, 200, device="cuda", dtype=BF16, requires_grad=True)
    torch._dynamo.reset()
    found = []
    for _ in range(2):
        with config.patch(strict=True):
            out = torch.compile(F.scaled_dot_product_attention)(q, k, v, attn_mask=table)
            found.append([out, *torch.autograd.grad(out.float().square().mean(), (q, k, v, table))])
    assert {(r.status, r.mask, r.forward) for r in sites()} == {("replaced", "full + bias", "portable")}
    assert all(map(torch.equal, *found))
    of = [t.detach().double().requires_grad_() for t in (q, k, v, table)]
    exact = ((of[0] @ of[1].mT / 16 + of[3]).softmax(3) @ of[2]).detach()
    assert (found[0][0].double() - exact).norm() <= 0.02 * exact.norm()
    true = torch.autograd.grad(((of[0] @ of[1].mT / 16 + of[3]).softmax(3) @ of[2]).square().mean(), of)
    for a, b in zip(found[0][1:], true, strict=True):
        assert (a.double() - b).norm() <= 0.03 * b.norm()
