"""Bitwise reproducibility on a GPU: repeats, load, poisoned memory, graphs, processes, batch; and what fails it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from dash_inductor.kernels.portable import standalone
from dash_inductor.model import Band

from ..support import gpu_digest
from ..support.attention import Attention, Gradients, compiled_backward
from ..support.distribution import ROOT
from ..support.repeats import differing_runs, digest

pytestmark = pytest.mark.gpu

# q_len, kv_len, head dim, mask, group, schedule (None: the planner's)
SHAPES = [
    (1024, 1024, 128, Band(0), 1, None),
    (1023, 1023, 64, Band(), 4, None),
    (2048, 2048, 128, Band(0, 255), 1, None),
    (1024, 1024, 128, Band(0), 1, "spt"),
    (1000, 1500, 64, Band(), 4, "ascending"),
    (1024, 1024, 64, Band(0), 1, "bent_fold"),
    (8300, 1024, 64, Band(0), 1, "bent_fold"),  # long enough for tile schedules to be bent
]
MORE = [
    (1024, 1024, 128, Band(0), 1, "descending"),
    (1024, 1024, 64, Band(), 1, "shift"),
    (1024, 1024, 64, Band(0), 1, "symmetric_shift"),
    (777, 777, 80, Band(-40, 40), 2, None),
    (300, 1023, 32, Band(0, None, "bottom_right"), 8, "bent_fold"),
]
Shape = tuple[int, int, int, Band, int, "str | None"]


def arch() -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


class Run:
    """One problem and its compiled backward; calling it returns the gradients."""

    def __init__(self, shape: Shape, *, batch: int = 2, kv_heads: int = 4) -> None:
        q_len, kv_len, head_dim, mask, group, schedule = shape
        self.problem = p = Attention.random(q_len, kv_len, head_dim, mask, batch=batch, kv_heads=kv_heads, group=group)
        self.forward = p.rounded_forward()
        self.backward = compiled_backward(mask, p.scale, p.plan(arch(), schedule))

    def __call__(self) -> Gradients:
        p = self.problem
        return self.backward(p.do, p.q, p.k, p.v, *self.forward)


@pytest.mark.parametrize("load", [False, True], ids=["idle", "load"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_thousand_repeats(shape: Shape, load: bool) -> None:
    run = Run(shape)
    assert differing_runs(run, 1000, load=load) == 0


@pytest.mark.parametrize("shape", MORE, ids=str)
def test_fifty_repeats(shape: Shape) -> None:
    cooperative = shape[5] in ("shift", "symmetric_shift")
    run = Run(shape, batch=1)
    # a cooperative launch needs all SMs it asks for: under load it may fail, and is not tried
    assert differing_runs(run, 50) == 0
    assert cooperative or differing_runs(run, 50, load=True) == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_poisoned_memory(shape: Shape) -> None:
    """Nothing that was not written is read: neither PyTorch's poison nor NaN left in the allocator's cache shows."""
    run = Run(shape)
    clean = [t.clone() for t in run()]
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # of the module
    assert differing_runs(run, 50, poisoned=True) == 0
    assert all(map(torch.equal, clean, run()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_graph_replay(shape: Shape) -> None:
    run = Run(shape)
    expected = [t.clone() for t in run()]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = run()

    def replay() -> Gradients:
        graph.replay()
        return captured

    assert differing_runs(replay, 200) == 0
    assert differing_runs(replay, 50, load=True) == 0
    assert all(map(torch.equal, expected, captured))


def test_processes_agree() -> None:
    """Two fresh processes and this one; each compiles for itself."""
    command = [sys.executable, "-m", "tests.support.gpu_digest"]
    root = ROOT
    outputs = {
        subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=300).stdout.split()[-1]
        for _ in range(2)
    }
    assert outputs == {gpu_digest.compute()}


@pytest.mark.parametrize("schedule", [None, "spt", "bent_fold", "ascending"])
def test_batch_invariance(schedule: str | None) -> None:
    """The gradients of a (batch, head) have the same bits alone, in a batch of 5, and at another place of the batch."""
    mask = Band() if schedule == "ascending" else Band(0)
    length = 8300 if schedule == "bent_fold" else 500
    whole = Run((length, 500, 64, mask, 2, schedule), batch=5, kv_heads=3)
    p, gradients = whole.problem, whole()
    order = torch.tensor([3, 1, 4, 0, 2], device="cuda")
    moved = whole.backward(*(t[order] for t in (p.do, p.q, p.k, p.v, *whole.forward)))
    assert all(torch.equal(a[order], b) for a, b in zip(gradients, moved, strict=True))
    single = compiled_backward(mask, p.scale, p.plan(arch(), schedule))
    for b in range(5):
        alone = single(*(t[b : b + 1] for t in (p.do, p.q, p.k, p.v, *whole.forward)))
        assert all(torch.equal(a[b : b + 1], c) for a, c in zip(gradients, alone, strict=True))


@pytest.mark.parametrize("schedule", [None, "spt"])
@pytest.mark.parametrize("length", [512, 500])
def test_static_and_dynamic_lengths_agree(schedule: str | None, length: int) -> None:
    """One kernel for all lengths, and one for this length and layout, give the same bits."""
    p = Attention.random(length, length, 64, Band(0), group=2)
    plan, forward = p.plan(arch(), schedule), p.rounded_forward()
    static = compiled_backward(p.mask, p.scale, plan)(p.do, p.q, p.k, p.v, *forward)
    dynamic = compiled_backward(p.mask, p.scale, plan, dynamic=True)
    other = Attention.random(300, 300, 64, Band(0), group=2)
    dynamic(other.do, other.q, other.k, other.v, *other.rounded_forward())
    assert all(map(torch.equal, static, dynamic(p.do, p.q, p.k, p.v, *forward)))
    torch._dynamo.reset()
    contiguous = [t.contiguous() for t in (p.do, p.q, p.k, p.v, *forward)]
    assert all(map(torch.equal, static, compiled_backward(p.mask, p.scale, plan)(*contiguous)))


def launcher(problem: Attention, wait: bool) -> Callable[[], list[torch.Tensor]]:
    """The portable ordered kernel launched directly, as it is or without waiting for its semaphore."""
    plan, site = problem.plan("sm_80", "ascending"), problem.site()  # on sm_90 the Hopper kernel is planned
    _, kernel = standalone.render(plan, site)  # delta comes from below
    if not wait:
        assert "@waiting bra SPIN;" in kernel.text
        kernel = dataclasses.replace(kernel, text=kernel.text.replace("@waiting bra SPIN;", ""))
    compiled, _ = standalone.compile_for(kernel, arch())
    q, k, v, do = (t.contiguous() for t in (problem.q, problem.k, problem.v, problem.do))
    out, lse = problem.rounded_forward()
    tensors = {"Q": q, "K": k, "V": v, "DO": do, "LSE": lse, "DELTA": (out.float() * do.float()).sum(-1)}
    tensors |= {"DV": torch.empty_like(v), "DK_OUT": torch.empty_like(k), "DQ": torch.zeros(q.shape, device="cuda")}
    tensors["ws_ptr"] = torch.zeros(1 + q.numel() // q.shape[3], dtype=torch.int32, device="cuda")
    arguments = [tensors[name] for name in kernel.names]

    def run() -> list[torch.Tensor]:
        tensors["DQ"].zero_()
        tensors["ws_ptr"].zero_()
        compiled[(kernel.grid, 1, 1)](*arguments)
        return [tensors["DQ"], tensors["DK_OUT"], tensors["DV"]]

    return run


def test_negative_control_without_the_wait() -> None:
    """The same kernel whose semaphore is not waited for fails the same harness."""
    problem = Attention.random(2048, 2048, 64, Band(), batch=4, kv_heads=8)
    assert differing_runs(launcher(problem, wait=True), 300, load=True) == 0
    assert differing_runs(launcher(problem, wait=False), 300, load=True) > 0


def test_negative_control_pytorch_default() -> None:
    """PyTorch's FlashAttention-2 backward without deterministic algorithms fails the same harness."""
    p = Attention.random(2048, 2048, 64, Band(), batch=4, kv_heads=8)
    out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        p.q, p.k, p.v, 0.0, False, False
    )

    def run() -> Gradients:
        gradients: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            p.do, p.q, p.k, p.v, out, lse, None, None, 2048, 2048, 0.0, False, seed, offset
        )
        return gradients

    assert differing_runs(run, 100) > 0


def test_digest_sees_one_bit() -> None:
    tensor = torch.zeros(1000, device="cuda")
    changed = tensor.clone()
    changed[500] = -0.0
    assert torch.equal(tensor, changed)
    assert digest([tensor]) != digest([changed])
