"""The demo: one whole run at a tiny size, and an exit code that tells when something is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from expecttest import assert_expected_inline

from dash_inductor.model.reasons import Reason
from dash_inductor.observe.records import SiteRecord
from dash_inductor.planning import costs, plan
from examples import compiled, demo, training
from examples.training import Run

TINY = replace(training.CPU, hidden=32, heads=2, kv_heads=1, layers=1, length=80, batch=2, steps=3)
KEPT = SiteRecord("sdpa_backward", "aten::sdpa_backward", "kept", Reason.DROPOUT, "", None, None, "", "", "")


@pytest.fixture(autouse=True)
def tiny_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tiny model on the CPU; what `main` sets for its process ends with the test."""
    monkeypatch.setattr(training, "CPU", TINY)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    with torch._inductor.config.patch(fx_graph_cache=True), torch._functorch.config.patch(enable_autograd_cache=True):
        yield


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """`train` gives these runs, and nothing is compiled."""
    runs = [Run([torch.tensor(1.5)] * 3, {"weight": torch.ones(2, 2)}) for _ in range(2)]
    left = list(runs)
    monkeypatch.setattr(training, "train", lambda settings, tokens, report: left.pop(0))
    monkeypatch.setattr(compiled, "kernel_table", lambda site, arch: (plan(site, arch), "kernels"))
    return runs


def sites_are(monkeypatch: pytest.MonkeyPatch, *records: SiteRecord) -> None:
    monkeypatch.setattr(demo.dash_inductor, "sites", lambda: records)


def test_whole_demo(capsys: pytest.CaptureFixture[str]) -> None:
    with torch._inductor.config.patch({"aot_inductor.debug_compile": True}):  # C++ without optimisation
        code = demo.main()
    shown, bar = capsys.readouterr()
    assert code == 0, shown
    table = next(line for line in shown.splitlines() if " replaced " in line)
    assert table.split()[:5] == ["2", "replaced", "2x2(1)x80x16", "float32", "causal"]
    assert "reference/two_pass" in table
    assert "bitwise equal: 3 losses, and 12 parameter tensors" in shown
    digests = {line.split()[-1] for line in shown.splitlines() if "sha256" in line}
    assert len(digests) == 1
    assert "kernel hopper" in shown
    assert f"numerics key v{costs.NUMERICS_VERSION}/hopper/" in shown
    assert "dq, dk, dv  64 x 128" in shown
    assert "run 2: 100%" in bar


def test_different_runs_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_training: list[Run]
) -> None:
    sites_are(monkeypatch, *[replace(KEPT, status="replaced", reason=None)] * 2)
    no_training[1].parameters["weight"] = no_training[1].parameters["weight"] * (1 + 2**-20)
    assert demo.main() == 1
    assert "differs: weight" in capsys.readouterr().out


def test_kept_site_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_training: list[Run]
) -> None:
    sites_are(monkeypatch, replace(KEPT, status="replaced", reason=None), KEPT)
    assert demo.main() == 1
    assert "sdpa_backward: kept, dropout" in capsys.readouterr().out


@pytest.mark.usefixtures("no_training")
def test_missing_site_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sites_are(monkeypatch, replace(KEPT, status="replaced", reason=None))
    assert demo.main() == 1
    assert "1 attention backwards were seen, not 2" in capsys.readouterr().out


def test_loss_table_shows_first_and_last_step() -> None:
    run = Run([torch.tensor(1 / step) for step in range(1, 31)])
    assert_expected_inline(
        demo.loss_table(run, run, lines=3),
        """\
step  run 1        run 2
   1  1            1
  15  0.0666666701  0.0666666701
  30  0.0333333351  0.0333333351""",
    )


def test_bar_moves_with_the_reports(capsys: pytest.CaptureFixture[str]) -> None:
    with demo.progress_bar("run", 2) as report:
        report(1, 0.5)
        report(2, 0.25)
    assert "2/2" in capsys.readouterr().err


def test_conditions_are_described() -> None:
    assert demo.describe(TINY) == "1 layers, hidden 32, 2 heads, 1 kv heads, 2 sequences of 80 bytes a step, float32"
