"""Recording on a GPU: fingerprints as on the CPU, under CUDA graphs too, and no bit changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dash_guard
from dash_guard.fingerprints.fingerprint import add_lanes, fingerprint
from dash_guard.recordings.compare import compare
from dash_guard.recordings.file import path_of
from dash_guard.recordings.recording import Recording
from tests.support.blocks import BLOCKS, train
from tests.support.distribution import ROOT

from ..support.divergent import RANK, STEP, TENSOR

pytestmark = pytest.mark.gpu


def tensors() -> dict[str, Tensor]:
    raw = torch.randint(0, 256, (1 << 21,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).cuda()
    floats = raw.view(torch.float32)
    return {
        "many chunks": floats,
        "transposed": floats.view(512, 1024).t(),
        "expanded": floats[:1].expand(1000),
        "4 bytes": floats[1:1000],
        "2 bytes": raw.view(torch.bfloat16)[1:1000],
        "1 byte": raw[3:1000],
        "odd": raw[: 8 * 4096 + 5],
        "scalar": floats[5],
        "empty": floats[:0],
        "complex": raw.view(torch.complex64)[:333].conj(),
        "bool": raw[:77] > 100,
        "float64": raw.view(torch.float64)[:333],
    }


def test_fingerprints_are_those_of_the_cpu() -> None:
    all_ = tensors()
    for name, tensor in all_.items():
        assert fingerprint(tensor) == fingerprint(tensor.cpu()), name
    together = torch.zeros(len(all_) + 1, 2, dtype=torch.int64, device="cuda")
    add_lanes(list(all_.values()), together, range(1, len(all_) + 1))
    for (name, tensor), lanes in zip(all_.items(), together[1:].tolist(), strict=True):
        alone = torch.zeros(1, 2, dtype=torch.int64)
        add_lanes([tensor.cpu()], alone, [0])
        assert lanes == alone[0].tolist(), name
    assert together[0].tolist() == [0, 0]


def train_compiled(mode: str | None) -> nn.Module:
    torch._dynamo.reset()
    return train(
        lambda model: torch.compile(model, mode=mode),
        steps=6,
        length=256,
        head_dim=64,
        device="cuda",
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_recording_changes_no_bit_and_sees_attention(tmp_path: Path, mode: str | None, deterministic: None) -> None:
    without = train_compiled(mode)
    for name in ("a", "b"):
        with dash_guard.record(tmp_path / name):
            recorded = train_compiled(mode)
        assert all(map(torch.equal, without.parameters(), recorded.parameters()))
    assert compare(tmp_path / "a", tmp_path / "b").verdict == "equal"
    steps = list(Recording(path_of(tmp_path / "a", 0)).steps())
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6]
    seen = [[str(e.name) for e in entries if e.name.phase == "gradient of attention"] for _, entries in steps]
    assert all(len(names) == 3 * BLOCKS for names in seen), seen
    attention = {e.fingerprint for _, entries in steps for e in entries if e.name.phase == "gradient of attention"}
    assert len(attention) == 18 * BLOCKS


def test_a_captured_operator_appends_at_every_replay(tmp_path: Path) -> None:
    tensor, scratch = torch.zeros(64, 32, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    with dash_guard.record(tmp_path) as recorder:
        recorder.prepare(tensor.device)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.ops.dash_guard.observe([tensor, tensor.t()], ["x", "y"], scratch)
        for step in range(3):
            tensor.fill_(step)
            graph.replay()
            graph.replay()
            recorder.step()
    graph.replay()  # nobody records
    for step, entries in Recording(path_of(tmp_path, 0)).steps():
        x, y = (fingerprint(torch.full(shape, step - 1.0)) for shape in ((64, 32), (32, 64)))
        assert [(e.name.tensor, e.fingerprint.hex()) for e in entries] == [
            ("x", x), ("y", y), ("x (call 2)", x), ("y (call 2)", y),
        ]  # fmt: skip


def test_recording_waits_for_nothing(tmp_path: Path) -> None:
    """The host is through with its steps while the device still waits."""
    model = nn.Linear(256, 256, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(8, 256, device="cuda")

    def step() -> None:
        model(inputs).sum().backward()
        optimizer.step()

    with dash_guard.record(tmp_path):
        for cycles in (50_000_000, 2_000_000_000):  # the first time, kernels are loaded and memory is pinned
            torch.cuda.synchronize()
            torch.cuda._sleep(cycles)
            slept = torch.cuda.Event()
            slept.record()
            for _ in range(3):
                step()
        assert not slept.query()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_flipped_bit_is_named_over_nccl(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "guard.tests.support.divergent", "cuda", "2", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    text = f"step {STEP}: rank 0 and rank 1 differ from each other in gradient {TENSOR}"
    assert all(text in json.loads(line)["raised"] for line in result.stdout.splitlines())
    for fault, phase in (("before", "local gradient"), ("after", "gradient")):
        found = compare(tmp_path / "none", tmp_path / fault)
        assert str(found.first) == f"step {STEP}, rank {RANK}: {phase} {TENSOR}"
    assert compare(tmp_path / "none", tmp_path / "again").verdict == "equal"
