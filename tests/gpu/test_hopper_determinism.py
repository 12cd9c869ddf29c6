"""Bitwise reproducibility of the Hopper kernel: repeats, load, graphs, processes, machines; and what fails it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters

from dash_inductor import lowering
from dash_inductor.kernels.hopper.backward import launch
from dash_inductor.model import Band
from dash_inductor.operators import attention as ops

from ..support import hopper_bits, hopper_calls
from ..support.attention import Attention, Gradients
from ..support.calls import backward_spec
from ..support.distribution import ROOT
from ..support.hopper import MARKS, Direct, any_forward
from ..support.repeats import bits, differing_runs
from ..support.unordered import unordered_adds

pytestmark = MARKS

# head dims of q and of v, mask, schedule, group, q_len, kv_len; `bent_fold` bends tile schedules over 64 q tiles, which
# are 64 rows high, or 128 at head dim 64
SHAPES = [
    (64, 64, Band(0), "spt", 1, 1024, 1024),
    (64, 64, Band(), "ascending", 4, 1000, 1500),
    (128, 128, Band(), "ascending", 1, 1024, 1024),
    (128, 128, Band(0), "bent_fold", 1, 2048, 2048),
    (128, 128, Band(0), "bent_fold", 1, 4096, 4096),
    (64, 64, Band(-70), "bent_fold", 4, 8300, 3000),
    (128, 128, Band(0, 255), "descending", 8, 1023, 1023),
    (192, 128, Band(0), "spt", 1, 1024, 1024),
    (256, 256, Band(0), "spt", 2, 700, 1000),
]
CO_RESIDENT = [
    (128, 128, Band(), "shift", 1, 1024, 1024),
    (128, 128, Band(0), "symmetric_shift", 1, 1000, 1300),
]
Shape = tuple[int, int, Band, str, int, int, int]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def direct(shape: Shape, *, batch: int = 2, kv_heads: int = 4, head_chunk: int = 4) -> Direct:
    head_dim, value_dim, mask, schedule, group, q_len, kv_len = shape
    p = Attention.random(
        q_len, kv_len, head_dim, mask, batch=batch, kv_heads=kv_heads, group=group, value_dim=value_dim
    )
    return Direct(p, schedule, head_chunk=head_chunk)


@pytest.mark.parametrize("load", [False, True], ids=["idle", "load"])
@shapes
def test_thousand_repeats(shape: Shape, load: bool) -> None:
    assert differing_runs(direct(shape), 1000, load=load) == 0


@pytest.mark.parametrize("shape", CO_RESIDENT, ids=str)
def test_repeats_of_co_resident_schedules(shape: Shape) -> None:
    """Idle only: under load a cooperative launch waits for its SMs or fails."""
    assert differing_runs(direct(shape, batch=1), 1000) == 0


@shapes
def test_poisoned_memory(shape: Shape) -> None:
    """Nothing that was not written is read: neither PyTorch's poison nor NaN left in the allocator's cache shows."""
    run = direct(shape)
    clean = [t.clone() for t in run()]
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # of the module
    assert differing_runs(run, 50, poisoned=True) == 0
    assert all(map(torch.equal, clean, run()))


@pytest.mark.parametrize("shape", SHAPES + CO_RESIDENT, ids=str)
def test_graph_replay(shape: Shape) -> None:
    """The direct call is captured: neither allocation nor launch goes past the stream."""
    run = direct(shape, batch=1)
    expected = [t.clone() for t in run()]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = run()

    def replay() -> Gradients:
        graph.replay()
        return captured

    assert differing_runs(replay, 200) == 0
    if shape not in CO_RESIDENT:
        assert differing_runs(replay, 200, load=True) == 0
    assert all(map(torch.equal, expected, captured))


@pytest.mark.parametrize(
    ("q_len", "kv_len", "group"), [(16384, 128, 1), (256, 256, 1), (16384, 128, 8), (1024, 1024, 2)]
)
def test_calls_in_turn_do_not_meet(q_len: int, kv_len: int, group: int) -> None:
    """Problems of one shape in turn find one another's semaphores and sums in their workspace, and use none of them.

    Few CTAs and many q tiles: the kernels of a call overlap as far as they can.
    """
    runs = []
    for seed in range(2):
        p = Attention.random(q_len, kv_len, 128, Band(), batch=1, kv_heads=1, group=group, seed=seed)
        runs.append(Direct(p, "ascending", forward=any_forward(p)))
    expected = []
    for run in runs:
        run()  # what the next one could find of an earlier call is its own
        expected.append([t.clone() for t in run()])
    assert not torch.equal(expected[0][0], expected[1][0])
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(600):
        for got, wanted in zip(runs[i % 2](), expected[i % 2], strict=True):
            different += (bits(got) != bits(wanted)).any()
    assert int(different) == 0


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_reduce_overhead(shape: Shape) -> None:
    """``mode="reduce-overhead"`` captures the op in a graph of its own; its bits are the direct call's."""
    run = direct(shape)
    p = run.problem
    lowering.register()

    spec = str(backward_spec(p.mask, p.scale))

    def backward(*tensors: torch.Tensor) -> Gradients:
        gradients: Gradients = ops.attention_backward(*tensors, [], spec, str(run.plan), "test")
        return gradients

    compiled = torch.compile(backward, mode="reduce-overhead", dynamic=False)
    counters.clear()
    expected = run()
    for _ in range(20):
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(p.do, p.q, p.k, p.v, *run.forward)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(expected, got, strict=True))
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_processes_agree() -> None:
    """Two fresh processes and this one; each compiles for itself."""
    command = [sys.executable, "-m", "tests.support.hopper_bits"]
    root = ROOT
    processes = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert all(json.loads(output.splitlines()[-1]) == hopper_bits.compute() for output in outputs)


def test_machines_agree() -> None:
    """The committed digests of this Triton, made on one GPU of this architecture, hold on this one."""
    expected = hopper_bits.golden()
    if expected is None:
        pytest.skip("no committed digests of this Triton: run python -m tests.support.hopper_bits --write")
    assert hopper_bits.compute() == expected


@pytest.mark.parametrize("schedule", ["ascending", "descending", "spt", "bent_fold"])
def test_batch_invariance(schedule: str) -> None:
    """The gradients of a (batch, head) have the same bits alone, in a batch of 5, and at another place of the batch."""
    length = 8300 if schedule == "bent_fold" else 500
    whole = direct((64, 64, Band(0), schedule, 2, length, 500), batch=5, kv_heads=3)
    p, gradients = whole.problem, whole()
    order = torch.tensor([3, 1, 4, 0, 2], device="cuda")
    tensors = p.do, p.q, p.k, p.v, *whole.forward
    moved = whole.on(*(t[order] for t in tensors))
    assert all(torch.equal(a[order], b) for a, b in zip(gradients, moved, strict=True))
    for b in range(5):
        alone = whole.on(*(t[b : b + 1] for t in tensors))
        assert all(torch.equal(a[b : b + 1], c) for a, c in zip(gradients, alone, strict=True))


@pytest.mark.parametrize("schedule", ["ascending", "descending", "spt", "bent_fold"])
def test_head_chunk_does_not_change_bits(schedule: str) -> None:
    shape = (128, 128, Band(0), schedule, 2, 4200, 4200)
    first, *others = (direct(shape, head_chunk=head_chunk)() for head_chunk in (1, 2, 3, 8, 64))
    assert all(all(map(torch.equal, first, other)) for other in others)


@pytest.mark.parametrize("schedule", ["ascending", "descending", "spt", "bent_fold"])
def test_the_place_of_a_head(schedule: str) -> None:
    """A head has the same bits wherever it stands among others, and among however many; other heads have others."""
    whole = direct((128, 128, Band(0), schedule, 1, 4200, 4200), batch=1, kv_heads=6)
    p, gradients = whole.problem, whole()
    tensors = p.do, p.q, p.k, p.v, *whole.forward
    order = torch.tensor([4, 0, 5, 1, 3, 2], device="cuda")
    moved = whole.on(*(t[:, order] for t in tensors))
    fewer = whole.on(*(t[:, 2:] for t in tensors))
    assert all(torch.equal(a[:, order], b) for a, b in zip(gradients, moved, strict=True))
    assert all(torch.equal(a[:, 2:], b) for a, b in zip(gradients, fewer, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(gradients, moved, strict=True))


@shapes
def test_any_number_of_ctas(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """One CTA that takes all work ids, a few, and one for every work id."""
    run = direct(shape)
    expected = run()
    for ctas in (1, 7, 131, 1 << 30):
        hopper_calls.forget()
        with monkeypatch.context() as patch:
            patch.setattr(launch, "_ctas", lambda tile_schedule, *_, ctas=ctas: min(tile_schedule.work_ids, ctas))
            assert all(map(torch.equal, expected, run())), ctas
    hopper_calls.forget()


def test_negative_control() -> None:
    """A kernel whose adds wait for no semaphore fails the same harness, though its gradients are as good."""
    shape = (64, 64, Band(), "ascending", 1, 2048, 2048)
    ordered = direct(shape, batch=4, kv_heads=8)
    expected = ordered()
    assert differing_runs(ordered, 300, load=True) == 0
    with unordered_adds():
        assert differing_runs(ordered, 300, load=True) > 0
        gradients = ordered()
    for a, b in zip(gradients, expected, strict=True):
        assert (a - b).norm() <= 2**-8 * b.norm()  # apart by roundings of fp32 sums, seen after rounding to bf16
    assert all(map(torch.equal, expected, ordered()))
