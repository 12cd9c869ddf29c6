"""The demo: what it proves, what it prints, and an exit code that tells when something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from expecttest import assert_expected_inline

from dash_inductor.config import config
from dash_inductor.planning import plan
from examples import compiled, demo, one_run, training
from examples.one_run import Outcome
from examples.training import Run

from ..support.distribution import ROOT

REPLACED = {
    "name": "sdpa_backward",
    "status": "replaced",
    "reason": None,
    "shape": "2x4(2)x256x64 float32",
    "mask": "causal",
    "plan": "reference/two_pass/dkdv=64x64w1s1/dq=64x64w1s1",
    "source": "/a/folder/sdpa_attention.py:193 in model.layers.0.self_attn",
}
FALLBACK = REPLACED | {"status": "fallback", "reason": "dropout", "plan": None}


def outcome(weight: float = 1.0, *sites: dict[str, object]) -> Outcome:
    return Outcome(
        Run([torch.tensor(1.5)] * 3, {"weight": torch.full((2, 2), weight)}), [*sites] or [REPLACED], 9.0, 1.0
    )


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    """The outcomes of the three processes; nothing is trained and nothing compiled."""
    found = {"run 1": outcome(), "run 2": outcome(), "control": outcome(1 + 2**-20)}
    monkeypatch.setattr(demo, "run_process", lambda name, size, folder: found[name])
    monkeypatch.setattr(compiled, "kernel_table", lambda site, arch: (plan(site, arch), "kernels"))
    monkeypatch.setitem(training.SIZES, "tiny", replace(training.TINY, layers=1))
    return found


def test_equal_runs_and_a_different_control_pass(
    outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--size", "tiny"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert "Runs 1 and 2 are bitwise equal: 3 losses, and 1 parameter tensors with 4 values." in shown
    assert "The control run differs in 1 of these 4. Every attention was replaced." in shown


def test_different_runs_fail(outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    outcomes["run 2"] = outcome(1 + 2**-22)
    assert demo.main(["--size", "tiny"]) == 1
    assert "run 1 and run 2 differ: weight" in capsys.readouterr().out


def test_blind_comparison_fails(outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    outcomes["control"] = outcome()
    assert demo.main(["--size", "tiny"]) == 1
    assert "the comparison is blind" in capsys.readouterr().out


def test_fallback_site_fails(outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    outcomes["run 2"] = outcome(1.0, FALLBACK)
    assert demo.main(["--size", "tiny"]) == 1
    assert "run 2: sdpa_backward is not replaced: dropout" in capsys.readouterr().out


def test_missing_site_fails(outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    outcomes["control"] = outcome(2.0, REPLACED, REPLACED)
    assert demo.main(["--size", "tiny"]) == 1
    assert "control: 2 attention backwards were seen, not 1" in capsys.readouterr().out


def test_loss_table_marks_what_differs() -> None:
    losses = [torch.tensor(1 / step) for step in range(1, 31)]
    control = [*losses[:-1], torch.tensor(1 / 30 + 2**-28)]
    assert_expected_inline(
        demo.loss_table({"run 1": Run(losses), "run 2": Run(losses), "control": Run(control)}, lines=3),
        """\
step  run 1         run 2         control
   1  1             1             1
  15  0.0666666701  0.0666666701  0.0666666701
  30  0.0333333351  0.0333333351  0.0333333388 *

* not the bits of run 1""",
    )


def test_sites_with_one_fate_share_a_row() -> None:
    assert_expected_inline(
        demo.site_table([REPLACED, REPLACED, FALLBACK]).split("\n\n")[0],
        """\
sites  status    shape                  mask    kernel/schedule     line
2      replaced  2x4(2)x256x64 float32  causal  reference/two_pass  sdpa_attention.py:193
1      fallback  2x4(2)x256x64 float32  causal  dropout             sdpa_attention.py:193""",
    )


def test_control_adds_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process after the other, here in this one: equal settings give equal bits, the control's do not."""
    wide = replace(training.TINY, heads=1, length=144)  # three tiles of keys: two terms have but one order of a sum
    monkeypatch.setitem(training.SIZES, "tiny", wide)
    schedule = demo.RUNS["control"]["DASH_INDUCTOR_SCHEDULE"]
    runs = {}
    with torch._inductor.config.patch({"aot_inductor.debug_compile": True}), config.patch(cpu="reference"):
        for name, settings in {"run 1": {}, "run 2": {}, "control": {"schedule": schedule}}.items():
            with config.patch(**settings):
                one_run.dash_inductor.clear_sites()
                one_run.train(name, "tiny").save(tmp_path / "out.pt")
            runs[name] = Outcome.load(tmp_path / "out.pt")
    assert demo.verify({name: found.run for name, found in runs.items()}) == []
    assert demo.unexpected(runs, wide.layers) == []
    assert "/descending/" in runs["control"].sites[0]["plan"]


def test_failing_process_ends_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo.sys, "executable", "/bin/false")
    with pytest.raises(SystemExit, match="run 1 ended with exit status 1"):
        demo.run_process("run 1", "tiny", tmp_path)


def test_conditions_are_described() -> None:
    assert demo.describe(training.TINY) == (
        "1 layers, hidden size 32, 2 heads and 1 kv heads (2 sequences of 80 bytes a step, float32)"
    )


@pytest.mark.full
def test_whole_demo() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--size", "cpu"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert max(map(len, ended.stdout.splitlines())) <= 100
    assert "reference/two_pass" in ended.stdout
    assert "kernel hopper" in ended.stdout
    assert "run 1: compiling the model" in ended.stderr
