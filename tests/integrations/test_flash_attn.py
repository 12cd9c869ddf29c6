"""Functions with flash-attn's names, on the CPU: against definitions, compiled and not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dash_inductor
from dash_inductor import config, sites
from dash_inductor.errors import ArgumentError
from dash_inductor.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from dash_inductor.records.records import clear_sites

from ..support.packed import documents, packed_attention

HEADS, KEY_HEADS, DIM = 4, 2, 16


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    torch._dynamo.reset()
    clear_sites()
    with config.patch(cpu="reference", strict=True):
        yield


def tensors(*shape: int, keys: int | None = None) -> list[Tensor]:
    """Query, key and value: [*shape, heads, head dimension]."""
    generator = torch.Generator().manual_seed(shape[-1])
    sizes = (*shape, HEADS, DIM), *[(*shape[:-1], keys or shape[-1], KEY_HEADS, DIM)] * 2
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def exact(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], softcap: float, sink: Tensor | None) -> Tensor:
    """[batch, length, heads, head dimension]; places are counted from the ends, and -1 is no limit."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    s = q @ k.mT / math.sqrt(DIM)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    distance = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    left, right = window
    hidden = (distance > left if left >= 0 else False) | (distance < -right if right >= 0 else torch.zeros(()).bool())
    s = s.masked_fill(hidden, -math.inf)
    if sink is not None:
        s = torch.cat([s, sink.double()[:, None, None].expand(s.shape[0], -1, s.shape[2], 1)], -1)
    return (s.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


def both(function: Callable[..., Tensor], given: list[Tensor], *more: Any, **options: Any) -> Iterator[list[Tensor]]:
    """The output and the gradients: of a plain call, and of one in a compiled function."""

    def program(*tensors: Tensor) -> Tensor:
        return function(*tensors, *more, **options)

    for run in (program, torch.compile(program, fullgraph=True)):
        torch.use_deterministic_algorithms(run is not program)
        try:
            out = run(*given)
            yield [out.detach(), *torch.autograd.grad(out.square().sum(), given)]
        finally:
            torch.use_deterministic_algorithms(False)


CALLS: list[dict[str, Any]] = [
    {"causal": True},
    {"window_size": (None, None), "softcap": 3.0, "num_splits": 4},
    {"causal": True, "window_size": (9, -1), "deterministic": True},
    {"window_size": (5, 3), "softmax_scale": None, "alibi_slopes": None},
    {"causal": True, "learnable_sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]


def test_dynamic_lengths() -> None:
    """A causal call whose lengths are equal in every call is one of the fastest operator."""
    run = torch.compile(lambda *given: flash_attn_func(*given, causal=True), fullgraph=True, dynamic=True)
    torch.use_deterministic_algorithms(True)
    try:
        for length in (40, 56):
            given = tensors(2, length)
            found = run(*given)
            assert (found - exact(*given, (-1, 0), 0.0, None)).abs().max() < 1e-5
    finally:
        torch.use_deterministic_algorithms(False)
    assert [(record.status, record.mask) for record in sites()] == [("replaced", "causal")]


@pytest.mark.parametrize(("options", "lengths"), [*itertools.product(CALLS, ((40, 40), (30, 44)))], ids=str)
def test_a_call(options: dict[str, Any], lengths: tuple[int, int]) -> None:
    given = tensors(2, lengths[0], keys=lengths[1])
    left, right = (-1 if side is None else side for side in options.get("window_size", (-1, -1)))
    window = left, 0 if options.get("causal") else right
    expected = exact(*given, window, options.get("softcap", 0.0), options.get("learnable_sink"))
    grads = torch.autograd.grad(expected.square().sum(), given)
    for found in both(flash_attn_func, given, **options):
        for ours, true in zip(found, (expected, *grads), strict=True):
            torch.testing.assert_close(ours.double(), true.double(), atol=1e-4, rtol=1e-4)
    assert {record.status for record in sites()} == {"replaced"}


@pytest.mark.parametrize("said", [True, False], ids=["the longest is said", "it is not said"])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (20, 0)], ids=str)
def test_packed_documents(window: tuple[int, int], said: bool) -> None:
    """Other numbers of tokens and of documents, too; one record for each compilation."""
    options = {"causal": window[1] == 0, "window_size": (window[0], -1)}
    for places in ((0, 30, 31, 100), (0, 64, 90), (0, 12, 50, 51, 120)):
        starts, longest = documents(*places), max(b - a for a, b in itertools.pairwise(places)) if said else None
        given = tensors(places[-1])
        expected = packed_attention(*given, starts, window)
        grads = torch.autograd.grad(expected.square().sum(), given)
        for found in both(flash_attn_varlen_func, given, starts, starts, longest, longest, **options):
            for ours, true in zip(found, (expected, *grads), strict=True):
                torch.testing.assert_close(ours, true, atol=1e-4, rtol=1e-4)
    assert {record.status for record in sites()} == {"replaced"}


def test_dropout() -> None:
    given = tensors(2, 40)
    torch.manual_seed(0)
    first, second = (flash_attn_func(*given, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)


def test_the_flag_of_the_program_and_the_switch() -> None:
    """The flag is as before; while dash_inductor is off, PyTorch computes."""
    given = tensors(2, 40)
    expected = flash_attn_func(*given, causal=True)
    assert not torch.are_deterministic_algorithms_enabled()
    clear_sites()
    with dash_inductor.disabled():
        torch.testing.assert_close(flash_attn_func(*given, causal=True), expected)
    assert not sites()


def test_what_is_not_supported() -> None:
    given, starts = tensors(2, 8), documents(0, 8)
    for name, value in (("alibi_slopes", torch.ones(HEADS)), ("return_attn_probs", True), ("block_table", starts)):
        with pytest.raises(ArgumentError, match=f"{name}.*does not support"):
            flash_attn_func(*given, **{name: value})
    with pytest.raises(ArgumentError, match="dropout_p"):
        flash_attn_varlen_func(*tensors(8), starts, starts, 8, 8, dropout_p=0.1)
    with pytest.raises(TypeError, match="positional"):
        flash_attn_func(*given, 0.25)  # type: ignore[misc]  # a scale in FlashAttention-3, a probability in 2
