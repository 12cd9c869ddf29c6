"""A log-sum-exp that the program reads, and its gradient, on a GPU: both families of kernels, values and bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dash_inductor import config, sites
from dash_inductor.frontends import all as frontends
from dash_inductor.kernels.families import PORTABLE
from dash_inductor.planning import planner
from dash_inductor.records.records import clear_sites

from ..support import base_2
from ..support.flash_attn import FA3, fa2_varlen
from ..support.packed import documents
from ..support.repeats import differing_runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

FAMILIES = [
    ("hopper", 64, 64),
    ("hopper", 128, 128),
    ("hopper", 192, 128),
    ("hopper", 256, 256),
    ("portable", 64, 64),
    ("portable", 128, 128),
]
ON = pytest.mark.parametrize(("family", "dim", "value_dim"), FAMILIES)


@pytest.fixture(autouse=True)
def the_entry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(frontends, "FRONTENDS", (*frontends.FRONTENDS, base_2.find))
    torch._dynamo.reset()
    clear_sites()
    yield
    torch.cuda.empty_cache()


def on(family: str) -> Any:
    return mock.patch.object(planner, "FAMILIES", (PORTABLE,)) if family == "portable" else nullcontext()


def made(*shapes: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(*shape, device="cuda", generator=generator).to(dtype) for shape in shapes]


def check(family: str) -> None:
    (record,) = sites()
    assert record.plan is not None
    assert (record.status, record.plan.kernel) == ("replaced", family)
    assert not record.forward.startswith("not replaced")


def near(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 2e-2) -> None:
    for ours, true in zip(found, expected, strict=True):
        error, size = float((ours.double() - true).abs().max()), max(0.5, float(true.abs().max()))
        assert error <= tolerance * size, f"{error:.2e} of {size:.2e}"


@ON
@pytest.mark.parametrize("causal", [False, True])
def test_its_gradient(family: str, dim: int, value_dim: int, causal: bool) -> None:
    """With the output's gradient and alone; grouped heads, and lengths that are no multiple of a tile."""
    q, k, v, do = made((2, 4, 300, dim), (2, 2, 333, dim), (2, 2, 333, value_dim), (2, 4, 300, value_dim))
    grad_lse = made((2, 4, 300), dtype=torch.float32)[0]
    with on(family), config.patch(strict=True):
        compiled = torch.compile(lambda *t: base_2.Function.apply(*t, causal))
        leaves = [t.requires_grad_() for t in (q, k, v)]

        def run(factor: float = 1.0) -> list[Tensor]:
            out, lse = compiled(*leaves)
            return [out, lse, *torch.autograd.grad((out, lse), leaves, (do * factor, grad_lse))]

        found, alone = run(), run(0.0)
        check(family)
        assert differing_runs(run, 50, load=True) == 0
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = base_2.exact(*doubles, causal)
    near(
        found,
        [out, lse, *torch.autograd.grad((out, lse), doubles, (do.double(), grad_lse.double()), retain_graph=True)],
    )
    expected = torch.autograd.grad(lse, doubles[:2], grad_lse.double())
    near(alone[2:4], expected)
    assert not alone[4].any()


@ON
@pytest.mark.parametrize("kv_len", [300, 200])
def test_values(family: str, dim: int, value_dim: int, kv_len: int) -> None:
    """Queries that see no key, of which there are some where keys are fewer, have minus infinity."""
    q, k, v = made((2, 300, 4, dim), (2, kv_len, 2, dim), (2, kv_len, 2, value_dim))
    do = made((2, 300, 4, value_dim))[0]
    with on(family), config.patch(strict=True):
        compiled = torch.compile(lambda *t: FA3(*t, causal=True, return_lse=True))
        leaves = [t.requires_grad_() for t in (q, k, v)]

        def run() -> list[Tensor]:
            out, lse = compiled(*leaves)
            return [out, lse, *torch.autograd.grad(out, leaves, do)]

        found = run()
        check(family)
        assert differing_runs(run, 50) == 0
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = FA3(*doubles, causal=True, return_lse=True)
    assert torch.equal(found[1] == -torch.inf, lse == -torch.inf)
    assert int((lse == -torch.inf).sum()) == 2 * 4 * (300 - kv_len)
    near(
        [t.nan_to_num(neginf=0.0) for t in found],
        [t.nan_to_num(neginf=0.0) for t in (out.detach(), lse, *torch.autograd.grad(out, doubles, do.double()))],
    )


@pytest.mark.parametrize(("family", "dim"), [("hopper", 64), ("hopper", 128), ("portable", 64), ("portable", 128)])
def test_packed_documents(family: str, dim: int) -> None:
    q, k, v, do = made((700, 4, dim), (700, 2, dim), (700, 2, dim), (700, 4, dim))
    starts = documents(0, 130, 130, 131, 400, 700, device="cuda")
    attend: Callable[..., Any] = lambda q, k, v: fa2_varlen(  # noqa: E731
        q, k, v, starts, starts.view(-1), 300, causal=True, return_lse=True
    )
    with on(family), config.patch(strict=True):
        compiled = torch.compile(attend)
        leaves = [t.requires_grad_() for t in (q, k, v)]

        def run() -> list[Tensor]:
            out, lse = compiled(*leaves)
            return [out, lse * 2, *torch.autograd.grad(out, leaves, do)]

        found = run()
        check(family)
        assert differing_runs(run, 50, load=True) == 0
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = attend(*doubles)
    near(found, [out.detach(), lse * 2, *torch.autograd.grad(out, doubles, do.double())])
