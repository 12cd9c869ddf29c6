"""Scatters by permutations, and of few elements of a line, on a GPU: values, bits, errors of bad indices, memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dash_inductor
from dash_inductor.records.records import all_records, clear_sites

from ..support.distribution import ROOT
from ..support.processes import run_python_unchecked
from ..support.repeats import differing_runs
from ..support.scatters import FEW, PERMUTATIONS, PROGRAMS, step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

ROWS, WIDTH = 8192, 1024


def rows(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(ROWS, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).to(dtype)


def peak(run: Callable[[Tensor], Tensor], x: Tensor) -> int:
    step(run, x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(run, x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_bits_and_memory(name: str) -> None:
    """Near double precision; 50 runs under load have the same bits; no more memory than PyTorch's default."""
    program, x = PROGRAMS[name], rows()
    exact = step(program, x.double())
    compiled = torch.compile(program)
    found = step(compiled, x)
    records = [record for record in all_records() if record.rewrite in ("permutations", "small_scatter")]
    assert {record.status for record in records} == {"replaced"}
    assert {record.rewrite for record in records} >= {"permutations" if name in PERMUTATIONS else "small_scatter"}
    for ours, true in zip(found, exact, strict=True):
        assert (ours - true).norm() <= 4 * torch.finfo(torch.bfloat16).eps * true.norm()
    assert differing_runs(lambda: step(compiled, x), 50, load=True) == 0
    ours = peak(compiled, x)
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    with dash_inductor.disabled():
        default = peak(torch.compile(program), x)
    assert ours <= default + (1 << 20)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["grouped", "combined", *FEW])
def test_dynamic_lengths(name: str, dtype: torch.dtype) -> None:
    clear_sites()
    program, compiled = PROGRAMS[name], torch.compile(PROGRAMS[name])
    for count in (ROWS, ROWS // 2 + 8):
        x = rows(dtype)[:count]
        found, exact = step(compiled, x, dynamic=True), step(program, x.double())
        for ours, true in zip(found, exact, strict=True):
            assert (ours - true).norm() <= 8 * torch.finfo(dtype).eps * true.norm()
    assert any(record.rewrite in ("permutations", "small_scatter") for record in all_records())


def test_the_control_differs() -> None:
    """Atomic additions of PyTorch's default: what the comparison of bits has to notice."""
    torch.use_deterministic_algorithms(False)
    values, indices = rows(torch.float32), torch.arange(ROWS, device="cuda") % 3
    assert differing_runs(lambda: [values.new_zeros(3, WIDTH).index_add_(0, indices, values)], 50, load=True) > 0


BAD = """
    import torch
    torch.use_deterministic_algorithms(True)
    x = torch.randn(64, 100, device="cuda")
    index = torch.full((64, 1), NUMBER, device="cuda")
    grad = torch.ones(64, 1, device="cuda")

    @torch.compile
    def backward(x, index, grad):
        return torch.zeros_like(x).scatter_add(1, index, grad)

    backward(x, index % 100, grad)
    torch.cuda.synchronize()
    print("compiled", flush=True)
    backward(x, index, grad)
    torch.cuda.synchronize()
    print("no error", flush=True)
"""


@pytest.mark.parametrize("number", [100, -1])
def test_a_bad_index_is_an_error(number: int) -> None:
    done = run_python_unchecked(BAD.replace("NUMBER", str(number)), path=ROOT)
    assert "compiled" in done.stdout
    assert "no error" not in done.stdout
    assert "device-side assert" in done.stderr
