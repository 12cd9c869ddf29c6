"""Operators of flash-attn 2 and 3 on a GPU, by exact math where they are not replaced: values and bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor import config, sites
from dash_inductor.records.records import clear_sites

from ..support.flash_attn import FA3, HUB, fa2, fa2_kvpacked, fa2_qkvpacked, fa2_varlen
from ..support.packed import documents
from ..support.repeats import differing_runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    clear_sites()
    yield
    torch.cuda.empty_cache()


def made(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    found = [torch.randn(*shape, device="cuda", generator=generator).bfloat16() for shape in shapes]
    return [t.requires_grad_() for t in found]


def run(function: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    out = function(*leaves)
    grad_out = torch.linspace(-1, 1, out.shape[-1], device="cuda", dtype=out.dtype).expand_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def check(function: Callable[..., Tensor], leaves: list[Tensor], kernel: str = "hopper", repeats: int = 50) -> None:
    """Values against the operators in fp64, and the same bits in all runs."""
    compiled = torch.compile(function)
    with config.patch(strict=True):
        found = run(compiled, leaves)
    (record,) = sites()
    assert record.plan is not None
    assert (record.status, record.plan.kernel) == ("replaced", kernel)
    assert not record.forward.startswith("not replaced")
    expected = run(function, [t.detach().double().requires_grad_() for t in leaves])
    for ours, true in zip(found, expected, strict=True):
        assert ours.shape == true.shape
        error, size = float((ours.double() - true).abs().max()), max(0.5, float(true.abs().max()))
        assert error <= 2e-2 * size, f"{error:.2e} of {size:.2e}"
    assert differing_runs(lambda: run(compiled, leaves), repeats, load=True) == 0


def shapes(dim: int, kv_len: int = 300) -> list[tuple[int, ...]]:
    return [(2, 300, 8, dim), (2, kv_len, 2, dim), (2, kv_len, 2, dim)]


@pytest.mark.parametrize("package", [fa2, FA3, HUB])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_causal(package: Any, dim: int) -> None:
    check(functools.partial(package, causal=True), made(*shapes(dim)))


@pytest.mark.parametrize("package", [fa2, FA3])
@pytest.mark.parametrize(
    ("kv_len", "options"),
    [
        (300, {"window": (100, 0)}),
        (450, {"window": (200, 70)}),
        (450, {"causal": True}),
        (200, {"causal": True}),
    ],
)
def test_windows(package: Any, kv_len: int, options: dict[str, Any]) -> None:
    """Anchored bottom right; with fewer keys, some queries see none."""
    check(functools.partial(package, **options), made(*shapes(128, kv_len)))


def test_alibi() -> None:
    slopes = torch.linspace(0.01, 0.5, 8, device="cuda")
    check(functools.partial(fa2, causal=True, slopes=slopes), made(*shapes(64)), "portable")


def test_softcap() -> None:
    leaves = made(*shapes(64))
    with config.patch(strict=True):
        run(torch.compile(functools.partial(fa2, causal=True, softcap=5.0)), leaves)
    (record,) = sites()
    assert record.plan is not None
    kernel = record.plan.kernel  # which of them has it is no matter of this test
    torch._dynamo.reset()
    clear_sites()
    check(functools.partial(fa2, causal=True, softcap=5.0), leaves, kernel)


def test_tensors_that_have_several_in_one() -> None:
    check(lambda qkv: fa2_qkvpacked(qkv, True), made((2, 300, 3, 4, 64)))
    torch._dynamo.reset()
    clear_sites()
    check(lambda q, kv: fa2_kvpacked(q, kv, True), made((2, 300, 4, 64), (2, 300, 2, 2, 64)))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("package", ["2", "3"])
def test_documents(package: str, dim: int) -> None:
    starts = documents(0, 130, 130, 131, 400, 700, device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        second = starts.view(-1)
        if package == "2":
            found: Tensor = fa2_varlen(q, k, v, starts, second, 300, causal=True)
        else:
            found = FA3(q, k, v, causal=True, cu=starts, cu_k=second, longest=300)
        return found

    check(attend, made((700, 8, dim), (700, 2, dim), (700, 2, dim)))


def test_dropout() -> None:
    """The same seed drops the same, in forward and backward; about as much as was asked for."""
    leaves = made((2, 256, 4, 64), (2, 256, 4, 64), (2, 256, 4, 64))
    compiled = torch.compile(functools.partial(fa2, dropout_p=0.25))

    def seeded() -> list[Tensor]:
        torch.manual_seed(7)
        return run(compiled, leaves)

    with config.patch(strict=True):
        first = seeded()
    (record,) = sites()
    assert record.detail == "dropout with probability 0.25"
    assert differing_runs(seeded, 50) == 0
    with torch.no_grad():
        ones = [*leaves[:2], torch.ones_like(leaves[2])]
        torch.manual_seed(7)
        sums = compiled(*ones).float()
    assert abs(float(sums.mean()) - 1.0) < 0.02
    assert float(sums.std()) > 0.01
    assert not torch.equal(run(compiled, leaves)[0], first[0])


def test_compiled_layers_copy_nothing() -> None:
    """Between projections no kernel but attention's and the projections' touches the tensors of heads."""
    from torch._inductor.utils import run_and_get_code

    def model(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).unflatten(-1, (3, 8, 64)).unbind(2)
        found: Tensor = fa2(q, k, v, causal=True)
        return found.flatten(2) @ w[:512, :512]

    leaves = made((2, 300, 256), (256, 1536))
    leaves[1] = torch.cat([leaves[1].detach()] * 2).requires_grad_()
    leaves[0] = torch.cat([leaves[0].detach()] * 2, -1).requires_grad_()
    with config.patch(strict=True):
        _, code = run_and_get_code(lambda: torch.compile(model)(*leaves).sum().backward())
    assert code[0].count("attention_forward.direct(") == 1
    assert "triton_poi" not in code[0].split("def call(")[1].split("attention_forward.direct(")[0]
