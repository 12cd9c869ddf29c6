"""The Hopper kernel never hangs: SMs held by another kernel, another process on the GPU, grids that cannot be resident.

Every case that could hang runs in a process of its own, which is killed when its time is over.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.common.call_launches import CallLaunches
from dash_inductor.model import Band

from ..support.attention import Attention
from ..support.distribution import ROOT
from ..support.hopper import MARKS, Direct, any_forward
from ..support.processes import run_together

pytestmark = MARKS

SECONDS = 120
"""Far more than any case takes (start, compile and some tenths of a second of work)."""


def results(programs: Mapping[str, Sequence[str]]) -> list[dict[str, object]]:
    """The findings of programs of `hopper_progress` that run at the same time, each given by its arguments."""
    module = sys.executable, "-m", "tests.support.hopper_progress"
    commands = {name: (*module, *arguments) for name, arguments in programs.items()}
    printed = run_together(commands, seconds=SECONDS, folder=ROOT)
    return [json.loads(text.splitlines()[-1]) for text in printed.values()]


@pytest.mark.parametrize("free", [8, 1])
@pytest.mark.parametrize("mask", ["band", "documents"])
@pytest.mark.parametrize("schedule", ["ascending", "descending", "spt", "bent_fold"])
def test_most_sms_are_held(schedule: str, mask: str, free: int) -> None:
    """The work of 1024 work ids ends on the SMs that are left, with the bits of an idle GPU."""
    (found,) = results({f"{schedule} of a {mask} on {free} SMs": ("held", schedule, mask, str(free))})
    assert found == {"held until the end": True, "equal": True}


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("big", ("first", "second")),
        ("grouped", ("first", "second", "third")),
        ("grouped documents", ("first", "second", "third")),
    ],
)
def test_processes_at_once(case: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """They take turns on the GPU as the driver likes; all see the same bits every time.

    With all eight warps of a group's member releasing its semaphore instead of one thread, each of the three processes
    with grouped heads hung within 7000 runs (H100).
    """
    first, *rest = results({name: ("beside", str(tmp_path), case, name, *(set(names) - {name})) for name in names})
    assert all(found == first for found in rest)
    assert first["differing"] == 0


@pytest.mark.parametrize(("schedule", "mask"), [("shift", Band()), ("symmetric_shift", Band(0))], ids=str)
def test_co_residency_is_checked_before_the_launch(schedule: str, mask: Band, monkeypatch: pytest.MonkeyPatch) -> None:
    """These schedules wait both ways: with more CTAs than SMs they would hang."""

    def launched(*_: object) -> None:
        raise AssertionError("it was launched")

    monkeypatch.setattr(CallLaunches, "run", launched)
    p = Attention.random(4096, 4096, 128, mask, batch=2, kv_heads=16)
    with pytest.raises(ArgumentError, match=f"schedule='{schedule}'"):
        Direct(p, schedule, forward=any_forward(p))()
