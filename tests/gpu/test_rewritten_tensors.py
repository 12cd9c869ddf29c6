"""On a GPU, for every backend: tensors that are written to before the backward, and forwards without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch._functorch.config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from dash_inductor.config import config
from dash_inductor.records.records import FORWARD_ONLY, FULL, sites

from ..support.attention_frontends import ENTRIES, tensors_of
from ..support.rewriting import OUTPUT, differs, gradients_after

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

BACKENDS = {  # not cuDNN, which PyTorch refuses under deterministic algorithms
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "any": None,
}
MASKED = ("keys", "pairs", "pairs as floats", "documents", "document starts", "ordered numbers", "bias")
CASES = [
    (name, backend)
    for name in ENTRIES
    for backend in BACKENDS
    if (backend == "any" or name != "packed")
    and not (backend == "flash" and name in MASKED)
    and not (backend == "efficient" and name == "grouped")
]


@contextlib.contextmanager
def chosen(backend: str) -> Iterator[None]:
    backends = BACKENDS[backend]
    with contextlib.nullcontext() if backends is None else sdpa_kernel(backends), config.patch(strict=True):
        torch._dynamo.reset()
        yield


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_gradients_are_those_of_before_or_an_error(name: str, backend: str) -> None:
    entry = ENTRIES[name]
    tensors = tensors_of(entry, "cuda", torch.bfloat16)
    exact = {
        name: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for name, t in tensors.items()
    }
    expected = gradients_after(entry.exact or entry.function, exact, None)
    assert isinstance(expected, list)
    expected = [gradient.bfloat16() for gradient in expected]
    with chosen(backend), functorch_config.patch(donated_buffer=False):
        compiled = torch.compile(entry.function)
        assert not differs(gradients_after(compiled, tensors, None), expected)
        for written in (*tensors, OUTPUT):
            found = gradients_after(compiled, tensors, written)
            if isinstance(found, str):
                assert written not in entry.copied
            else:
                assert not differs(found, expected), written
    assert {(record.status, record.kind) for record in sites()} == {("replaced", FULL)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_bits_without_gradients_are_those_with_them(name: str, backend: str, dtype: torch.dtype) -> None:
    inputs = list(tensors_of(ENTRIES[name], "cuda", dtype).values())
    with chosen(backend):
        compiled = torch.compile(ENTRIES[name].function)
        with torch.no_grad():
            scored = compiled(*inputs)
        trained = compiled(*inputs)
        evaluated = compiled(*(t.detach() for t in inputs))
    assert torch.equal(scored, trained)
    assert torch.equal(evaluated, trained)
    assert {record.kind for record in sites()} == {FULL, FORWARD_ONLY}
    assert len({(record.status, str(record.plan)) for record in sites()}) == 1
