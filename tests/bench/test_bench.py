"""The bench command: its clock, what it compares, and what it prints."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from expecttest import assert_expected_inline

import dash_inductor
from dash_inductor import cli
from dash_inductor.bench import backward, results, step, variants
from dash_inductor.bench.results import Row
from dash_inductor.bench.timing import Timing, take_turns
from dash_inductor.cli import progress
from dash_inductor.config import config

TINY = backward.Shape(1, 2, 2, 32, 16, True)
TINY_STEP = step.Size(layers=1, hidden=32, heads=2, length=32, batch=1, vocabulary=16)


def silent(text: str) -> None:
    pass


@pytest.fixture(autouse=True)
def quick_compiler() -> Iterator[None]:
    """C++ without optimisation."""
    with torch._inductor.config.patch({"aot_inductor.debug_compile": True}):
        yield


def test_calls_take_turns() -> None:
    order: list[str] = []
    timings = take_turns({name: lambda name=name: order.append(name) for name in "ab"}, "cpu", repeats=2, warmup=1)  # type: ignore[misc]
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert set(timings) == {"a", "b"}


def test_timing_has_the_quartiles() -> None:
    assert Timing.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Timing(median=3.0, low=2.0, high=4.0)
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 7.0)


@pytest.mark.parametrize(
    ("values", "same"), [((1.0, 1.0, 1.0), True), ((1.0, 1.0, 1.0 + 2**-20), False), ((0.0, 0.0, -0.0), False)]
)
def test_same_bits_compares_bytes(values: tuple[float, ...], same: bool) -> None:
    left = [torch.tensor([value]) for value in values]
    assert variants.same_bits(lambda: [left.pop(0)], 2) is same


def test_backward_compares_three_variants() -> None:
    with config.patch(cpu="reference"):
        row = backward.measure(TINY, "cpu", silent, repeats=2)
    names = [variant.name for variant in variants.VARIANTS]
    assert (list(row.times), list(row.equal), row.not_run, row.kept) == (names, names, {}, "")
    assert not row.failed
    (record,) = dash_inductor.sites()  # the other two variants are without dash_inductor
    assert record.status == "replaced"
    assert not torch.are_deterministic_algorithms_enabled()


def test_variants_differ_in_what_runs() -> None:
    """On a CPU the default and the deterministic kernel are one, and the reference executor adds in another order."""
    gradients = {}
    with config.patch(cpu="reference"):
        for variant in variants.VARIANTS:
            with variant.active():
                gradients[variant.name] = backward.prepare(backward.Shape(1, 2, 2, 256, 64, True), variant, "cpu")()
    equal = [torch.equal(gradients["default"][0], gradients[name][0]) for name in ("deterministic", "dash")]
    assert equal == [True, False]
    torch.testing.assert_close(gradients["default"], gradients["dash"])


def test_step_compares_three_variants() -> None:
    with config.patch(cpu="reference"):
        row = step.measure(TINY_STEP, "cpu", silent, repeats=1)
    assert not row.failed
    assert len(row.times) == 3
    assert len(dash_inductor.sites()) == TINY_STEP.layers


def test_kept_attention_is_a_failure() -> None:
    row = backward.measure(TINY, "cpu", silent, repeats=1)  # config.cpu is "off"
    assert "cpu_off" in row.kept
    assert row.failed


def test_attention_that_is_not_seen_is_a_failure() -> None:
    row = Row("a shape", equal={"dash": True})
    row.note([])
    assert row.failed
    assert "doctor" in row.kept


def test_other_variants_are_without_dash_inductor_in_all_threads() -> None:
    seen = []
    for variant in variants.VARIANTS:
        with variant.active():
            thread = threading.Thread(target=lambda: seen.append(dash_inductor.is_enabled()))
            thread.start()
            thread.join()
    assert seen == [False, False, True]
    assert dash_inductor.is_enabled()


def test_what_does_not_run_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("No available kernel.\nAborting execution.")

    monkeypatch.setattr(backward, "prepare", refuse)
    row = backward.measure(TINY, "cpu", silent)
    assert row.not_run["dash"] == "RuntimeError: No available kernel."
    assert row.failed


ROWS = [
    Row(
        "2x16x4096x128 causal",
        {"default": Timing(1.25, 1.2, 1.3), "deterministic": Timing(2.5, 2.5, 2.52), "dash": Timing(1.0, 0.9, 1.1)},
        {"default": False, "deterministic": True, "dash": True},
    ),
    Row("1x4x256x64 full", {"default": Timing(123.4, 120, 130)}, {"default": True}, {"dash": "a reason"}),
]


def test_table_chart_and_legend_fit_100_columns() -> None:
    text = "\n\n".join([results.format_table(ROWS), results.LEGEND, results.format_chart(ROWS)])
    assert max(map(len, text.splitlines())) <= 100
    assert_expected_inline(
        text,
        """\
ms                    default     deterministic  dash        x default  x determ.  same bits
2x16x4096x128 causal  1.25 ±0.05  2.50 ±0.01     1.00 ±0.10  1.25       2.50       no yes yes
1x4x256x64 full       123 ±5      -              -           -          -          yes - -

default:       PyTorch as it is; its attention need not be deterministic
deterministic: PyTorch under use_deterministic_algorithms(True)
dash:          the same with dash_inductor
ms:            median of calls that take turns, ± half the distance between the quartiles
x default:     how many times as fast as the default dash is
x determ.:     how many times as fast as deterministic PyTorch dash is
same bits:     for each of the three, whether 5 more calls gave the bits of the first

2x16x4096x128 causal
  default        ██████████████████████████████████ 1.25 ms
  deterministic  ████████████████████████████████████████████████████████████████████ 2.50 ms
  dash           ███████████████████████████ 1.00 ms
1x4x256x64 full
  default        ████████████████████████████████████████████████████████████████████ 123 ms""",
    )
    assert [row.failed for row in ROWS] == [False, True]


def test_command_prints_one_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backward, "measure", lambda shape, device, begin, repeats: ROWS[0])
    assert cli.main(["bench", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["conditions"]["torch"] == torch.__version__
    assert [row["same bits"]["default"] for row in found["rows"]] == [False] * len(backward.ON_CPU)
    monkeypatch.setattr(step, "measure", lambda size, device, begin, repeats: ROWS[1])
    assert cli.main(["bench", "--step"]) == 1
    shown = capsys.readouterr().out
    assert "There is no CUDA GPU here" in shown
    assert "dash did not run: a reason" in shown


def test_plot_without_matplotlib_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert cli.main(["bench", "--plot", "chart.png"]) == 2
    assert 'pip install "dash-inductor[pictures]"' in capsys.readouterr().err


@pytest.mark.parametrize("path", ["chart.jpeg", "no_such_folder/chart.png"])
def test_picture_that_cannot_be_written_is_refused_first(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--plot", path]) == 2
    assert f"--plot='{path}' is not allowed" in capsys.readouterr().err


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results.plot(ROWS, tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").read_text().lstrip().startswith("<?xml")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal_is_one_line() -> None:
    stream = Terminal()
    with progress.Progress(2, stream) as bar:
        bar.begin("first part compiles")
        bar.begin("second part")
    shown = stream.getvalue()
    assert "\n" not in shown
    assert "[....................] first part compiles" in shown
    assert "[##########..........] second part" in shown
    assert shown.endswith("\r\033[K")


class Clock:
    """Stands for the time, and for the end that a bar waits for."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def monotonic(self) -> float:
        return self.now

    def wait(self, timeout: float) -> bool:
        self.now += timeout
        return self.now > self.seconds

    def set(self) -> None:
        pass


def test_bar_elsewhere_says_that_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 10 seconds, on a clock that its own waiting moves."""
    clock = Clock(seconds=25)
    monkeypatch.setattr(progress, "time", clock)
    stream = io.StringIO()
    bar = progress.Progress(1, stream)
    bar._end = clock  # type: ignore[assignment]
    bar.say("compiling")
    with bar:
        bar._ticker.join()
    text = "[....................] compiling"
    assert stream.getvalue().splitlines() == [text, f"{text}  10 s", f"{text}  20 s"]
