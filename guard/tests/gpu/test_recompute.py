"""Cross-rank recomputes and same-rank recomputes on a GPU: they change no bit, under CUDA graphs too, and a flipped bit
is named.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dash_guard.checks.cross_rank_recompute import CrossRankRecompute
from dash_guard.checks.same_rank_recompute import SameRankRecompute
from dash_guard.process.rank import Rank
from dash_guard.transport.channel import Local
from dash_guard.transport.messages import Message
from dash_inductor.observers import hooks
from tests.support.blocks import train
from tests.support.distribution import ROOT

pytestmark = pytest.mark.gpu

STEPS = 6


def train_compiled(mode: str | None) -> nn.Module:
    hooks.install()
    torch._dynamo.reset()
    return train(
        lambda model: torch.compile(model, mode=mode),
        steps=STEPS,
        length=256,
        head_dim=64,
        device="cuda",
        dtype=torch.bfloat16,
    )


def guarded(work: Callable[[], Any], cross_rank_recompute: bool = True) -> tuple[Any, list[Message], dict[str, Any]]:
    """What the work gives, what the guard's checks have sent, and their coverage."""
    local = Local()
    rank = Rank(0, 1, local.end(0))
    rank.checks = [CrossRankRecompute(rank, cross_rank_recompute=2)] if cross_rank_recompute else []
    rank.checks.append(SameRankRecompute(rank, same_rank_recompute=100))
    rank.start()
    try:
        given = work()
    finally:
        rank.close()
    return given, [m for m in local.receive() if m.kind != "coverage"], rank.coverage.to_dict()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_they_change_no_bit_of_compiled_code(mode: str | None, deterministic: None) -> None:
    without = train_compiled(mode)
    random = torch.cuda.get_rng_state()
    model, messages, coverage = guarded(lambda: train_compiled(mode))
    assert all(map(torch.equal, without.parameters(), model.parameters()))
    assert torch.equal(random, torch.cuda.get_rng_state())
    assert coverage["cross_rank_recompute"]["counts"]["calls"] >= STEPS // 2
    assert {message.kind for message in messages} == {"cross_rank_recompute"}
    assert not any("first" in message.body for message in messages), messages
    repeated = coverage["same_rank_recompute"]["counts"].get("steps", 0)
    assert repeated == STEPS if mode is None else repeated < STEPS, coverage


def test_a_bit_that_flips_once_is_found_by_a_same_rank_recompute(deterministic: None) -> None:
    calls = 0

    def flip(module: nn.Module, args: Any, result: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == struck:
            result.data.view(torch.int32)[3, 5] ^= 1 << 12

    def work() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 8)).cuda()
        model[2].register_forward_hook(flip)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(STEPS):
            with torch.autocast("cuda", torch.float32, enabled=step % 2 == 1):
                x = torch.randn(16, 64, device="cuda")
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    struck = 0
    _, messages, coverage = guarded(work, cross_rank_recompute=False)
    assert messages == []
    assert coverage["same_rank_recompute"]["counts"]["steps"] == STEPS
    assert calls == 2 * STEPS
    calls, struck = 0, 2 * 3 + 1  # the real execution of step 4
    _, (found,), _ = guarded(work, cross_rank_recompute=False)
    assert (found.step, found.body["phase"], found.body["tensor"]) == (4, "activation", "3")
    assert found.body["once"] != found.body["again"] == found.body["third"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_defect_of_one_gpu_is_found_over_nccl(tmp_path: Path) -> None:
    trials = [
        {"noisy": True, "steps": 3, "device": "cuda"},
        {"mode": "fsdp", "steps": 3, "device": "cuda"},
        {"kind": "forward", "rank": 1, "module": "blocks.1.up", "steps": 2, "device": "cuda"},
        {"mode": "fsdp", "kind": "backward", "rank": 1, "module": "blocks.1.up", "steps": 2, "device": "cuda"},
    ]
    command = [sys.executable, "-W", "ignore", "-m", "guard.tests.support.recomputed", "2", str(tmp_path)]
    result = subprocess.run(
        command, cwd=ROOT, input=json.dumps(trials), capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    results = [json.loads(line) for line in result.stdout.splitlines()]
    for clean in results[:2]:
        assert clean["findings"] == [], clean["findings"]
        assert clean["unchanged"]
    for faulty in results[2:]:
        (found,) = faulty["findings"]
        assert found["kind"] == "cross_rank_recompute"
        assert 1 in found["ranks"]
