"""Profiles of the Hopper backward: stamps change no bit, and say of every tile pair when it was computed and added."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dash_inductor
from dash_inductor import lowering
from dash_inductor.config import config
from dash_inductor.model import Band
from dash_inductor.operators import attention as ops
from dash_inductor.records.profiles import CALLS
from dash_inductor.schedule import Problem
from dash_inductor.schedule.jobs import scheduled_query_heads, tables

from ..support.attention import Attention, Gradients
from ..support.calls import backward_spec
from ..support.distribution import ROOT
from ..support.hopper import MARKS, Direct
from ..support.hopper_progress import Documents
from ..support.repeats import bits, differing_runs

pytestmark = MARKS

# head dims of q and of v, mask, schedule, group, q_len, kv_len
SHAPES = [
    (64, 64, Band(0), "spt", 1, 1024, 1024),
    (64, 64, Band(-70), "bent_fold", 4, 8300, 3000),
    (128, 128, Band(), "ascending", 1, 1024, 1024),
    (128, 128, Band(0), "bent_fold", 1, 2048, 2048),
    (128, 128, Band(0, 255), "descending", 8, 1023, 1023),
    (192, 128, Band(0), "spt", 1, 1024, 1024),
    (192, 192, Band(0), "spt", 1, 1000, 1000),
    (256, 256, Band(0), "spt", 2, 700, 1000),
]
CO_RESIDENT = [
    (128, 128, Band(), "shift", 1, 1024, 1024),
    (128, 128, Band(0), "symmetric_shift", 1, 1000, 1300),
]
Shape = tuple[int, int, Band, str, int, int, int]


@pytest.fixture(autouse=True)
def no_profiles() -> Iterator[None]:
    dash_inductor.clear_profile_runs()
    yield
    dash_inductor.clear_profile_runs()


def direct(shape: Shape, *, batch: int = 2, kv_heads: int = 4) -> Direct:
    head_dim, value_dim, mask, schedule, group, q_len, kv_len = shape
    p = Attention.random(
        q_len, kv_len, head_dim, mask, batch=batch, kv_heads=kv_heads, group=group, value_dim=value_dim
    )
    return Direct(p, schedule)


def expected_pairs(run: Direct) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Work id and rank of every tile pair, by query head among all of the batch, kv tile and q tile."""
    p, tiles = run.problem, run.plan.dkdv
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = p.q.shape, p.k.shape
    work = Problem(p.mask, q_len, kv_len, tiles.block_q, tiles.block_kv, batch, heads, head_chunk=run.plan.head_chunk)
    scheduled = scheduled_query_heads(True, heads, kv_heads)
    return {
        (job.head // heads * heads + scheduled[job.head % heads][0], column.kv, q): (job.work_id, rank)
        for job in tables(run.plan.schedule, work)
        for column in job.columns
        for q, rank in column.steps
    }


def check_profile(found: dict[str, Any], pairs: dict[tuple[int, int, int], tuple[int, int]]) -> None:
    """Every pair once, by its work id, its times in their order, a q tile's contributions in order of their ranks."""
    spans = {(span["head"], span["kv"], span["q"]): span for span in found["spans"]}
    assert len(spans) == len(found["spans"])
    assert {place: span["work_id"] for place, span in spans.items()} == {place: t for place, (t, _) in pairs.items()}
    assert min(span["start"] for span in spans.values()) == 0
    sms: dict[int, set[int]] = {}
    additions: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (head, kv, q), span in spans.items():
        assert span["start"] <= span["wait"] <= span["added"] <= span["end"]
        sms.setdefault(span["work_id"], set()).add(span["sm"])
        additions.setdefault((head, q), []).append((pairs[head, kv, q][1], span["added"]))
    assert all(len(found) == 1 for found in sms.values())
    assert set().union(*sms.values()) <= set(range(torch.cuda.get_device_properties(0).multi_processor_count))
    computing = sorted(span["wait"] - span["start"] for span in spans.values())
    assert computing[len(computing) // 2] > 200, "steps end before their matmuls can"
    for times in additions.values():
        added = [time for _, time in sorted(times)]
        assert added == sorted(added)


@pytest.mark.parametrize("shape", SHAPES + CO_RESIDENT, ids=str)
def test_bits_and_times(shape: Shape) -> None:
    """The bits with stamps are as without, in the calls that are recorded and in later ones."""
    run = direct(shape, batch=1 if shape in CO_RESIDENT else 2)
    expected, pairs = [bits(t).clone() for t in run()], expected_pairs(run)
    assert dash_inductor.profile_runs() == ()
    with config.patch(profile=True):
        for _ in range(CALLS + 2):
            assert all(map(torch.equal, map(bits, run()), expected))
    assert len(dash_inductor.profile_runs()) == CALLS
    for found in dash_inductor.profile_runs():
        check_profile(found.to_dict(), pairs)


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_repeats_under_load(shape: Shape) -> None:
    run = direct(shape)
    with config.patch(profile=True):
        assert differing_runs(run, 200, load=True) == 0


def test_documents() -> None:
    """Tile schedules by tables: only the pairs that somebody sees."""
    run = Documents.of(direct((128, 128, Band(0), "spt", 2, 4096, 4096)))
    expected = [bits(t).clone() for t in run()]
    with config.patch(profile=True):
        assert all(map(torch.equal, map(bits, run()), expected))
    (found,) = dash_inductor.profile_runs()
    spans = found.to_dict()["spans"]
    every = expected_pairs(run.direct)
    assert {(span["head"], span["kv"], span["q"]) for span in spans} < every.keys()
    assert len(spans) == 4 * 2 * int(run.data.visits.sum())  # batch elements have one table, for all heads


def test_nothing_waits() -> None:
    run = direct(SHAPES[3])
    with config.patch(profile=True):
        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(dash_inductor.profile_runs()) == 2


def test_a_graph_is_not_recorded() -> None:
    run = direct(SHAPES[3])
    expected = [bits(t).clone() for t in run()]
    with config.patch(profile=True):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
    for _ in range(3):
        graph.replay()
        assert all(map(torch.equal, map(bits, captured), expected))
    assert len(dash_inductor.profile_runs()) == 1


def test_reduce_overhead() -> None:
    """The calls before the graph is captured are profiled, and nothing of them stays in its pool."""
    run = direct(SHAPES[2])
    p, spec = run.problem, str(backward_spec(run.problem.mask, run.problem.scale))
    lowering.register()

    def backward(*tensors: torch.Tensor) -> Gradients:
        gradients: Gradients = ops.attention_backward(*tensors, [], spec, str(run.plan), "a site")
        return gradients

    expected = [bits(t).clone() for t in run()]
    with config.patch(profile=True):
        compiled: Callable[..., Gradients] = torch.compile(backward, mode="reduce-overhead", dynamic=False)
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            assert all(map(torch.equal, map(bits, compiled(p.do, p.q, p.k, p.v, *run.forward)), expected))
    assert 1 <= len(dash_inductor.profile_runs()) <= CALLS
    for found in dash_inductor.profile_runs():
        assert found.site == "a site"
        check_profile(found.to_dict(), expected_pairs(run))


def test_some_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first heads, if there is no room for all; the others' results are as ever."""
    run = direct(SHAPES[3])
    expected, pairs = [bits(t).clone() for t in run()], expected_pairs(run)
    monkeypatch.setattr("dash_inductor.records.profiles.BYTES_OF_A_CALL", 3 * 16 * 33 * 32 + 5)
    with config.patch(profile=True):
        assert all(map(torch.equal, map(bits, run()), expected))
    (found,) = dash_inductor.profile_runs()
    assert found.heads == 3
    check_profile(found.to_dict(), {place: value for place, value in pairs.items() if place[0] < 3})


PROGRAM = """
import torch
import torch.nn.functional as F
torch.use_deterministic_algorithms(True)
import dash_inductor

@torch.compile
def step(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().mean()

tensors = [torch.randn(2, 4, 1024, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
for _ in range(5):
    step(*tensors).backward()
(site,) = dash_inductor.sites()
print(site.name)
"""


def test_a_program(tmp_path: Path) -> None:
    """The variable alone makes a file for each of the first calls."""
    environ = {**os.environ, "DASH_INDUCTOR_PROFILE": "1", "RANK": "0", "PYTHONPATH": str(ROOT)}
    environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    site = done.stdout.split()[-1]
    paths = sorted((tmp_path / "dash_inductor_profile/rank0").iterdir())
    assert [path.name for path in paths] == [f"{site}-{number}.json" for number in range(1, CALLS + 1)]
    found = json.loads(paths[0].read_text())
    assert found["meta"]["site"] == site
    assert len({(span["head"], span["kv"], span["q"]) for span in found["spans"]}) == len(found["spans"]) > 0


def test_the_harness_can_fail() -> None:
    """A profile of another schedule, and one that lacks a pair, are refused."""
    run = direct(SHAPES[0])
    with config.patch(profile=True):
        run()
    (found,) = dash_inductor.profile_runs()
    profile, pairs = found.to_dict(), expected_pairs(run)
    check_profile(profile, pairs)
    with pytest.raises(AssertionError):
        check_profile({**profile, "spans": profile["spans"][1:]}, pairs)
    other = direct(SHAPES[0])
    other.plan = replace(other.plan, schedule="descending")
    with pytest.raises(AssertionError):
        check_profile(profile, expected_pairs(other))
