"""Zeros that take no memory, on a GPU: they are zeros, nobody can write to them, and steps have the same bits."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.config import config
from dash_inductor.upstream import zero_pages

from ..support.distribution import ROOT
from ..support.repeats import bits, differing_runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

ROWS, VOCABULARY = 4096, 16384
LOGITS = ROWS * VOCABULARY * 2
Step = Callable[[], list[Tensor]]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def logits_beside_the_loss(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x.tanh(), weight)
    return F.cross_entropy(logits.float(), labels), logits


def step_of(rows: int = ROWS, **options: Any) -> Step:
    torch.manual_seed(0)
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCABULARY, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (rows,), device="cuda")
    run = torch.compile(logits_beside_the_loss, **options)

    def step() -> list[Tensor]:
        loss, logits = run(x, weight, labels)
        return [loss.detach().clone(), logits.detach().clone(), *torch.autograd.grad(loss, [x, weight])]

    return step


def memory_of(step: Step) -> int:
    """Bytes that a step allocates at once, beside what it returns."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_zeros(dtype: torch.dtype) -> None:
    for count in (LOGITS, 8 * LOGITS, LOGITS + 2):  # the second takes more addresses
        found = zero_pages.zeros((2, count // 2), dtype, cuda())
        assert found is not None
        assert found.device == cuda()
        assert zero_pages.is_read_only(found)
        assert not found.any()
        assert torch.equal(found.clone(), torch.zeros_like(found))
    a, b = torch.randn(64, 4096, device="cuda"), zero_pages.zeros((4096, 4096), torch.float32, cuda())
    assert b is not None
    assert not (a @ b).any()
    assert not zero_pages.is_read_only(a)


def test_they_take_no_memory() -> None:
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    found = zero_pages.zeros((8 << 30,), torch.uint8, cuda())
    assert found is not None
    assert torch.cuda.memory_allocated() == before
    assert free - torch.cuda.mem_get_info()[0] <= 64 << 20  # tables of addresses


WRITES = """
import torch
from dash_inductor.upstream import zero_pages
found = zero_pages.zeros((1 << 26,), torch.uint8, torch.device("cuda", 0))
print(found.sum().item(), flush=True)
found[-1] = 1
torch.cuda.synchronize()
print("written")
"""


def test_nobody_writes_to_them() -> None:
    """A mistake would be an error, not other gradients somewhere else."""
    ended = subprocess.run([sys.executable, "-c", WRITES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout == "0\n", ended.stderr
    assert ended.returncode != 0
    assert "CUDA error" in ended.stderr


@pytest.mark.parametrize("dynamic", [False, True])
def test_steps(dynamic: bool) -> None:
    """The same bits in less memory."""
    found, memory = {}, {}
    for fill in (True, False):
        torch._dynamo.reset()
        with config.patch(fill_uninitialized_memory=fill):
            step = step_of(dynamic=dynamic)
            memory[fill], found[fill] = memory_of(step), step()
            if not fill:
                assert differing_runs(step, 100, poisoned=True) == 0
    assert all(map(torch.equal, map(bits, found[True]), map(bits, found[False])))
    assert memory[False] <= memory[True] - LOGITS // 2  # the smaller peak may be at another place of the step


def test_cuda_graphs() -> None:
    """Those that Inductor makes, and one of a whole step."""
    expected = step_of()()
    replayed = step_of(mode="reduce-overhead")
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in replayed()]
        assert all(map(torch.equal, map(bits, found), map(bits, expected)))
    torch._dynamo.reset()
    step = step_of()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        for x in found:
            x.zero_()
        graph.replay()
        assert all(map(torch.equal, map(bits, found), map(bits, expected)))


def test_capture_before_there_are_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture maps nothing, so that zeros are written then; later they are not."""
    monkeypatch.setattr(zero_pages, "_DEVICES", {})
    graph, shape = torch.cuda.CUDAGraph(), (LOGITS,)
    with torch.cuda.graph(graph):
        torch.ones(8, device="cuda").add_(1)
        within = zero_pages.zeros(shape, torch.uint8, cuda())
    assert within is None
    graph.replay()
    torch.cuda.synchronize()
    assert zero_pages.zeros(shape, torch.uint8, cuda()) is not None


def test_gradients_that_are_zeros_belong_to_the_program() -> None:
    x, y = (torch.randn(4096, 4096, device="cuda", requires_grad=True) for _ in range(2))
    function = torch.compile(lambda x, y: (x + 1, (y * 2).sin()))
    for _ in range(4):
        function(x, y)[1].sum().backward()
        assert x.grad is not None
        assert not x.grad.any()
        x.grad.add_(1).sub_(1)


def test_threads() -> None:
    """Steps of several threads share the addresses."""
    expected = step_of()()
    found: list[list[Tensor]] = []

    def work(step: Step) -> None:
        for _ in range(5):
            found.append(step())
        torch.cuda.synchronize()

    threads = [threading.Thread(target=work, args=(step_of(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 15
    assert all(torch.equal(bits(a), bits(b)) for each in found for a, b in zip(each, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_backward_on_two_gpus_gets_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tangents go from the one to the other, which may not read the page."""
    monkeypatch.setattr(zero_pages, "_RANGES", ranges := list[tuple[int, int]]())

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = (x.sin() * 2).to("cuda:0")
        return logits, (y * y).sum() + logits.cos().sum()

    x = torch.randn(4096, 4096, device="cuda:1", requires_grad=True)
    y = torch.randn(64, device="cuda:0", requires_grad=True)
    function = torch.compile(program)
    found = [torch.autograd.grad(function(x, y)[1], [x, y]) for _ in range(3)]
    expected = torch.autograd.grad(program(x, y)[1], [x, y])
    for gradients in found:
        assert all(torch.equal(a, b) for a, b in zip(gradients, found[0], strict=True))
        torch.testing.assert_close(gradients, expected)
    assert not ranges
