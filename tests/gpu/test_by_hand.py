"""Attention by hand on a GPU: gradients, bits, records, and memory, for programs as models have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import dash_inductor
from dash_inductor import sites
from dash_inductor.records.records import clear_sites

from ..support import by_hand

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

BATCH, HEADS, LENGTH, DIM, REPEATS = 2, 4, 515, 64, 50
Shape = tuple[int, ...]
QKV: tuple[Shape, ...] = ((BATCH, HEADS, LENGTH, DIM),) * 3
GROUPED: tuple[Shape, ...] = (QKV[0], *((BATCH, HEADS // 2, LENGTH, DIM),) * 2)
PROGRAMS: dict[str, tuple[Callable[..., Tensor], tuple[Shape, ...]]] = {
    "plain": (by_hand.plain, QKV),
    "flat": (by_hand.flat, QKV),
    "softcap": (by_hand.capped, GROUPED),
    "sinks": (by_hand.sinks, (*GROUPED, (HEADS,))),
    "sinks beside a bias": (by_hand.biased_sinks, (*QKV, (HEADS,), (HEADS, LENGTH, LENGTH))),
    "pair bias": (by_hand.pair, (*QKV, (1, 1, HEADS, LENGTH, LENGTH), QKV[0])),
}
NAMES = pytest.mark.parametrize("name", PROGRAMS)


def tensors(shapes: Sequence[Shape], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_() for shape in shapes]


def step(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    out = function(*inputs)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]


@NAMES
def test_values_and_bits(name: str) -> None:
    function, shapes = PROGRAMS[name]
    inputs = tensors(shapes)
    clear_sites()
    compiled = torch.compile(function)
    found = step(compiled, inputs)
    assert [record.status for record in sites()] == ["replaced"], [record.detail for record in sites()]
    eager = step(function, inputs)
    exact = step(function, [t.detach().double().requires_grad_() for t in inputs])
    for ours, theirs, true in zip(found, eager, exact, strict=True):
        floor = 8 * torch.finfo(ours.dtype).eps * true.abs().max()
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max() + floor
        assert ours.stride() == theirs.stride()
    for _ in range(REPEATS):
        assert all(map(torch.equal, step(compiled, inputs), found))


@NAMES
def test_inference_has_the_bits_of_training(name: str) -> None:
    function, shapes = PROGRAMS[name]
    inputs = tensors(shapes)
    compiled = torch.compile(function)
    trained = step(compiled, inputs)[0]
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), trained)


@pytest.mark.parametrize("name", ["plain", "softcap", "sinks"])
def test_memory_is_not_above_the_programs_own(name: str) -> None:
    function, shapes = PROGRAMS[name]
    inputs = tensors(shapes)

    def peak() -> int:
        torch.compiler.reset()
        compiled = torch.compile(function)
        step(compiled, inputs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(compiled, inputs)
        return torch.cuda.max_memory_allocated()

    ours = peak()
    with dash_inductor.disabled():
        assert ours <= peak()


def test_dropout_of_forward_and_backward_is_the_same() -> None:
    """A unit matrix as value shows the probabilities that are left, and its gradient has the same."""
    length = 64

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.dropout((q @ k.mT * 0.1).softmax(-1), 0.25) @ v

    q, k = tensors([(1, 2, length, DIM)] * 2)
    v = torch.eye(length, device="cuda", dtype=q.dtype).expand(1, 2, length, length).clone().requires_grad_()
    clear_sites()
    compiled = torch.compile(dropped)
    out = compiled(q, k, v)
    (dv,) = torch.autograd.grad(out, v, torch.eye(length, device="cuda", dtype=q.dtype).expand_as(out))
    assert [record.status for record in sites()] == ["replaced"], [record.detail for record in sites()]
    assert 0.7 < (out != 0).float().mean() < 0.8
    assert torch.equal(dv != 0, (out != 0).mT)
