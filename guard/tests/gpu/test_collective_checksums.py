"""Collective checksums on two GPUs with NCCL: they change no bit, and a damaged collective is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from ..support import damaged_collectives
from ..support.damaged_collectives import AT, OUTPUT, Trial
from ..test_collective_checksums import GATHER, REDUCE, SCATTER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CLEAN = (Trial("ddp"), Trial("replicate"), Trial("fsdp"))
DAMAGED = {
    Trial("ddp", 1, REDUCE, number=3): "all_reduce of 0-1",
    Trial("fsdp", 1, SCATTER, number=2): "reduce_scatter of 0-1",
    Trial("fsdp", 1, GATHER, OUTPUT, number=4): "all_gather of 0-1 in the backward",
}


def test_checksums_change_no_bit_and_damaged_collectives_are_named(tmp_path: Path) -> None:
    wanted = [*CLEAN, *(dataclasses.replace(trial, collectives=0) for trial in CLEAN), *DAMAGED]
    trials = [dataclasses.replace(trial, device="cuda") for trial in wanted]
    results = dict(zip(wanted, damaged_collectives.run(trials, tmp_path, world=2), strict=True))
    for trial in CLEAN:
        result = results[trial]
        assert result["bits"] == results[dataclasses.replace(trial, collectives=0)]["bits"], trial
        assert (result["findings"], result["off"]) == ([], []), trial
        assert result["coverage"]["collective_checksums"]["counts"]["repeated"] > 0, trial
    for trial, collective in DAMAGED.items():
        (finding,) = results[trial]["findings"]
        assert (finding["kind"], finding["step"], finding["collective"]) == ("collective", AT, collective), trial


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_hsdp_has_a_hook_between_its_groups(tmp_path: Path) -> None:
    """Two results that were summed twice, of what lies on another stream."""
    clean = [Trial(mode, device="cuda") for mode in ("hsdp", "accumulated hsdp", "summed hsdp")]
    damaged = Trial("hsdp", 1, REDUCE, number=2, device="cuda")
    trials = [*clean, *(dataclasses.replace(trial, collectives=0) for trial in clean), damaged]
    results = dict(zip(trials, damaged_collectives.run(trials, tmp_path, world=4), strict=True))
    for trial in clean:
        result = results[trial]
        assert result["bits"] == results[dataclasses.replace(trial, collectives=0)]["bits"], trial
        assert (result["findings"], result["off"]) == ([], []), trial
        assert result["coverage"]["collective_checksums"]["counts"]["repeated"] >= 4 * 4 * 2, trial
    (finding,) = results[damaged]["findings"]
    assert (finding["kind"], finding["step"], finding["collective"]) == ("collective", AT, "all_reduce of 1,3")
