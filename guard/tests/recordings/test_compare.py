"""Two recordings side by side: which tensor is said to be the first that differs, and what else is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dash_guard.cli import main
from dash_guard.recordings import page, report
from dash_guard.recordings.agreement import find, sentence
from dash_guard.recordings.compare import Comparison, compare
from dash_guard.recordings.file import Appender, Name, path_of
from dash_inductor.cli import outputs
from dash_inductor.errors import ArgumentError
from dash_inductor.observers import phases

from ..support.recordings import environment

TENSORS = [
    (phases.INITIAL, "w"),
    (phases.INPUT, "Model"),
    (phases.ACTIVATION, "Model"),
    (phases.ACTIVATION_GRADIENT, "Model"),
    (phases.ATTENTION_GRADIENT, "layer dQ"),
    (phases.LOCAL_GRADIENT, "w"),
    (phases.GRADIENT, "w"),
    (phases.PARAMETER, "w"),
]
Spoiled = Mapping[tuple[int, int, str], str]
"""Descriptions, by step, rank and phase, of tensors that are another one."""
NOTHING: Spoiled = {}


def record(
    folder: Path,
    steps: int = 3,
    ranks: int = 2,
    spoiled: Spoiled = NOTHING,
    lost: str = "",
    end: bool = True,
    numerics_keys: tuple[str, ...] = (),
    **facts: Any,
) -> Path:
    """A recording of every tensor in every step; `lost` is a phase that it lacks."""
    for rank in range(ranks):
        file = Appender(path_of(folder, rank))
        file.json(environment(rank, ranks, **facts))
        file.json({"type": "facts", "numerics_keys": numerics_keys})
        numbers: dict[Name, int] = {}
        for step in range(1, steps + 1):
            entries = []
            for phase, tensor in TENSORS:
                if phase == lost:
                    continue
                other = spoiled.get((step, rank, phase))
                name = Name(phase, tensor, other or "float32 [2]")
                if name not in numbers:
                    file.json({"type": "names", "names": [name]})
                    numbers[name] = len(numbers)
                entries.append((numbers[name], bytes([step % 256, rank, other is not None] + [0] * 13)))
            file.step(step, entries[:3])
            file.step(step, entries[3:])
        if end:
            file.json({"type": "end"})
        file.close()
    return folder


def test_equal_recordings(tmp_path: Path) -> None:
    result = compare(record(tmp_path / "a"), record(tmp_path / "b"))
    assert (result.verdict, result.exit_code, result.steps, result.ranks) == ("equal", 0, 3, 2)
    assert not result.facts
    assert not result.reasons
    assert report.headline(result) == "The runs are equal: 3 steps of 2 ranks, bit by bit"


@pytest.mark.parametrize("phase", [phase for phase, _ in TENSORS])
def test_the_first_tensor_is_named(tmp_path: Path, phase: str) -> None:
    """Every kind of tensor, alone and with all that follows from it."""
    later = [p for p, _ in TENSORS][[p for p, _ in TENSORS].index(phase) :]
    a = record(tmp_path / "a")
    alone = compare(a, record(tmp_path / "b", spoiled={(2, 1, phase): "float32 [2]"}))
    follows = {(step, rank, p): "float32 [2]" for p in later for rank in (0, 1) for step in (2, 3)}
    follows = {key: value for key, value in follows.items() if key != (2, 0, phase)}
    everything = compare(a, record(tmp_path / "c", spoiled=follows))
    for result in (alone, everything):
        assert result.first is not None
        assert (result.first.step, result.first.rank, result.first.phase) == (2, 1, phase)
        assert (result.verdict, result.exit_code, result.steps) == ("diverged", 1, 2)
        assert result.conclusion
    assert alone.others_count == 0
    assert everything.others_count == 2 * len(later) - 2


def test_what_comes_before_the_exchange_is_first_on_whatever_rank(tmp_path: Path) -> None:
    """Rank 1's own gradient is spoiled; the reduced one differs on both ranks, and rank 0 has nothing before it."""
    spoiled = {(2, 1, phases.LOCAL_GRADIENT): "x"} | {(2, rank, phases.GRADIENT): "x" for rank in (0, 1)}
    result = compare(record(tmp_path / "a"), record(tmp_path / "b", spoiled=spoiled))
    assert str(result.first) == "step 2, rank 1: local gradient w"
    assert result.conclusion.startswith("Before gradients are exchanged, only rank 1 differs.")
    assert [str(other) for other in result.others] == ["step 2, rank 0: gradient w", "step 2, rank 1: gradient w"]


def test_the_exchange_is_named_where_local_gradients_are_equal(tmp_path: Path) -> None:
    spoiled = {(2, rank, phases.GRADIENT): "float32 [2]" for rank in (0, 1)}
    a, b = record(tmp_path / "a"), record(tmp_path / "b", spoiled=spoiled)
    assert "every rank's gradient of this tensor is equal" in compare(a, b).conclusion
    lost = [record(tmp_path / f"{n}", lost=phases.LOCAL_GRADIENT, spoiled=s) for n, s in enumerate(({}, spoiled))]
    assert compare(*lost).conclusion.startswith("The difference arises in the backward")


def test_another_shape_differs(tmp_path: Path) -> None:
    result = compare(record(tmp_path / "a"), record(tmp_path / "b", spoiled={(1, 0, phases.INPUT): "float32 [3]"}))
    assert result.first is not None
    assert result.first.a.startswith("float32 [2] ")
    assert result.first.b.startswith("float32 [3] ")
    assert result.first.before == "initial parameter w"


def test_one_run_has_more_steps(tmp_path: Path) -> None:
    result = compare(record(tmp_path / "a", steps=2), record(tmp_path / "b", steps=4))
    assert (result.verdict, result.first, result.last_step) == ("diverged", None, 2)
    assert "a has no step 3 of rank 1" in result.reasons


def test_a_run_that_was_cut_off_is_equal_up_to_there(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a"), record(tmp_path / "b")
    whole = path_of(b, 1).read_bytes()
    path_of(b, 1).write_bytes(whole[:-40])
    result = compare(a, b)
    assert (result.verdict, result.exit_code, result.first) == ("not comparable", 2, None)
    assert any(reason.startswith("b was cut off: rank 1 ends at byte") for reason in result.reasons)
    killed = compare(a, record(tmp_path / "c", end=False))
    assert (killed.verdict, killed.steps) == ("not comparable", 3)
    spoiled = record(tmp_path / "d", end=False, spoiled={(2, 0, phases.INPUT): "x"})
    assert compare(a, spoiled).verdict == "diverged"


def test_runs_without_enough_in_common_are_not_comparable(tmp_path: Path) -> None:
    a = record(tmp_path / "a")
    ranks = compare(a, record(tmp_path / "b", ranks=3))
    assert (ranks.verdict, ranks.reasons) == ("not comparable", ["a is a run of 2 ranks, b of 3 ranks"])
    lost = compare(a, record(tmp_path / "c", lost=phases.INPUT))
    assert (lost.verdict, lost.reasons) == ("not comparable", ["only a has input Model"])
    empty = compare(a, record(tmp_path / "d", steps=0))
    assert empty.verdict == "not comparable"
    assert "no step is in both recordings" in empty.reasons
    with pytest.raises(ArgumentError, match="a folder with a recording"):
        compare(a, tmp_path / "nothing")


def test_other_rhythms_are_compared_where_they_meet(tmp_path: Path) -> None:
    """Steps 1 to 3 against steps 1 to 2, one of which says that it skips steps."""
    result = compare(record(tmp_path / "a"), record(tmp_path / "b", steps=2, every=2))
    assert (result.verdict, result.steps) == ("equal", 2)
    assert result.facts == [("every", 1, 2)]


def test_facts_that_differ_are_named(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"versions": {"torch": "2.13", "cuda": None}, "numerics_keys": ("k1", "k2"), "gpu": {}}
    other: dict[str, Any] = {
        "versions": {"torch": "2.14", "cuda": None},
        "numerics_keys": ("k2", "k3"),
        "gpu": {"name": "H100"},
    }
    result = compare(record(tmp_path / "a", **facts), record(tmp_path / "b", **other))
    assert result.verdict == "equal"
    assert sorted(result.facts) == [
        ("gpu.name", None, "H100"), ("numerics_keys", ["k1"], ["k3"]), ("versions.torch", "2.13", "2.14"),
    ]  # fmt: skip


def test_a_comparison_holds_one_step(tmp_path: Path) -> None:
    """A recording five times as long takes no more memory; the shorter one has several blocks."""
    import tracemalloc

    peaks = []
    for steps in (1000, 5000):
        a, b = (record(tmp_path / f"{name}{steps}", steps=steps, ranks=1) for name in "ab")
        compare(a, b)
        tracemalloc.start()
        assert compare(a, b).steps == steps
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def results(tmp_path: Path) -> dict[int, Comparison]:
    """A comparison for each exit code, with everything that can be shown."""
    a = record(tmp_path / "a", versions={"torch": "<1>"})
    diverged = record(tmp_path / "b", spoiled={(s, 1, p): "x" for s in (2, 3) for p, _ in TENSORS}, versions={})
    return {code: compare(a, other) for code, other in ((0, a), (1, diverged), (2, record(tmp_path / "c", ranks=1)))}


def test_the_command_prints_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code, result in results(tmp_path).items():
        assert main(["compare", result.a, result.b]) == code
        text = capsys.readouterr().out
        assert text == report.text(result) + "\n"
        assert all(len(line) <= report.WIDTH for line in text.splitlines() if str(tmp_path) not in line)
        assert main(["compare", "--json", result.a, result.b, "--html", str(tmp_path / "page.html")]) == code
        content = json.loads(capsys.readouterr().out)
        assert content == json.loads(json.dumps(result.to_dict()))
        assert (content["exit_code"], content["verdict"]) == (code, result.verdict)
        assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html(result)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "nothing")]) == 2
    assert "a folder with a recording" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "kinds"), [(0, ()), (1, ("failure",)), (2, ("error",))])
def test_junit(code: int, kinds: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, file = results(tmp_path)[code], tmp_path / "bits.xml"
    assert main(["compare", result.a, result.b, "--junit", str(file)]) == code
    assert capsys.readouterr().out == report.text(result) + "\n"
    suite = ElementTree.parse(file).getroot()
    counts = [suite.get(name) for name in ("tests", "failures", "errors")]
    assert counts == [
        "1",
        str(int(code == 1)),
        str(int(code == 2)),
    ]
    (case,) = suite
    assert (case.get("classname"), case.get("name")) == ("dash_guard.compare", f"{result.a} and {result.b}")
    assert tuple(each.tag for each in case) == (kinds or ("system-out",))
    assert case[0].text == report.text(result)
    assert not kinds or case[0].get("message") == report.headline(result)


def test_a_junit_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = results(tmp_path)[0]
    assert main(["compare", result.a, result.b, "--junit", str(tmp_path)]) == 2
    assert f"--junit {tmp_path} is not allowed" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("compare", "a", "no"), ("compare", "--layouts", "a", "c"), ("verify", "script.py")])
def test_an_error_is_a_junit_report(words: tuple[str, ...], tmp_path: Path) -> None:
    """And the report of an earlier run does not stay."""
    results(tmp_path)
    (tmp_path / "script.py").write_text("raise SystemExit('usage: script.py')")
    (tmp_path / "bits.xml").write_text("<testsuite/>")
    command = [sys.executable, "-m", "dash_guard", words[0], "--junit", "bits.xml", *words[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    suite = ElementTree.parse(tmp_path / "bits.xml").getroot()
    assert (done.returncode, suite.get("tests"), suite.get("failures"), suite.get("errors")) == (2, "1", "0", "1")
    (case,) = suite
    assert (case.get("classname"), [each.tag for each in case]) == (f"dash_guard.{words[0]}", ["error"])
    assert case[0].text == done.stderr.splitlines()[-1].removeprefix(f"dash-guard {words[0]}: ")


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_the_width_of_the_terminal(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "columns", lambda: columns)
    for result in results(tmp_path).values():
        main(["compare", result.a, result.b])
        lines = [line for line in capsys.readouterr().out.splitlines() if str(tmp_path) not in line]
        assert max(map(len, lines)) <= columns
        assert any(len(line) > columns - 20 for line in lines) or columns > 80


def test_the_page_stands_alone(tmp_path: Path) -> None:
    for result in results(tmp_path).values():
        html = page.html(result)
        assert report.headline(result) in html
        assert "<1>" not in html
        assert not any(word in html for word in ("http:", "https:", "src=", "href=", "<script", "@import", "url("))
        assert "prefers-color-scheme: dark" in html


def test_recordings_are_compared_without_torch(tmp_path: Path) -> None:
    record(tmp_path / "a")
    code = "import sys; from dash_guard.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    folder = str(tmp_path / "a")
    subprocess.run([sys.executable, "-c", code, "compare", folder, folder], check=True, capture_output=True)


def test_the_minority_is_named() -> None:
    labels = [("gradient", "u"), ("gradient", "v")]
    same, other, third = [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9, 9]
    assert find([0, 1, 2], labels, [same, same, same]) is None
    one = find([4, 5, 6], labels, [same, other, same])
    assert one is not None
    assert (one["tensor"], one["minority"], one["groups"]) == ("v", [5], [[4, 6], [5]])
    assert sentence(one) == "rank 5 differs from ranks 4, 6 in gradient v"
    two = find([0, 1], labels, [same, other])
    assert two is not None
    assert two["minority"] == []
    assert sentence(two) == "rank 0 and rank 1 differ from each other in gradient v; no majority says which is right"
    several = find([0, 1, 2, 3], labels, [third, same, other, same])
    assert several is not None
    assert several["minority"] == [0, 2]
    assert sentence(several) == "ranks 0, 2 differ from ranks 1, 3 in gradient v"


TRAINING = """
import sys
import torch

if "--seed" in sys.argv:
    torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("the script's own words")
"""


def verify(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "temporary").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "dash_guard", "verify", *words]
    variables = {**os.environ, "TMPDIR": str(folder / "temporary"), **environment}
    return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False)


def test_verify_runs_a_script_twice(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINING, encoding="utf-8")
    equal = verify(tmp_path, "script.py", "--seed")
    assert equal.returncode == 0, equal.stderr
    assert equal.stdout.startswith("The runs are equal: 3 steps of 1 rank, bit by bit")
    assert equal.stderr.count("the script's own words") == 2
    assert not list((tmp_path / "temporary").glob("dash-inductor-verify-*"))
    assert "dash-inductor-verify-" not in equal.stdout  # no folder that is not there
    diverged = verify(tmp_path, "--json", "--folder", "kept", "-m", "script")
    assert diverged.returncode == 1, diverged.stderr
    content = json.loads(diverged.stdout)
    assert (content["first"]["phase"], content["first"]["tensor"]) == ("initial parameter", "0.weight")
    assert compare(tmp_path / "kept" / "a", tmp_path / "kept" / "b").verdict == "diverged"
    again = verify(tmp_path, "--folder", "kept", "script.py")
    assert again.returncode == 2
    assert "has a recording already" in again.stderr


def test_verify_that_is_interrupted(tmp_path: Path) -> None:
    """Control-C reaches the script too, which is not to blame; nothing is left behind."""
    lines = "import os, signal, sys, time", "os.kill(getattr(os, sys.argv[1])(), signal.SIGINT)", "time.sleep(60)"
    (tmp_path / "script.py").write_text("\n".join(lines), encoding="utf-8")
    for who in ("getpid", "getppid"):
        result = verify(tmp_path, "script.py", who)
        assert (result.returncode, result.stderr.splitlines()[-1]) == (130, "dash-guard verify: interrupted")
        assert "exit status" not in result.stderr
        assert not list((tmp_path / "temporary").glob("dash-inductor-verify-*"))


def test_verify_of_a_script_that_imports_dash_guard_itself(tmp_path: Path) -> None:
    """Where torch loads no extensions; before torch or after it."""
    for number, first in enumerate(("dash_guard, torch", "torch, dash_guard")):
        lines = f"import {first}", "torch.manual_seed(0)", "torch.nn.Linear(2, 2)(torch.ones(1, 2))"
        (tmp_path / f"{number}.py").write_text("\n".join(lines), encoding="utf-8")
        result = verify(tmp_path, f"{number}.py", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert result.returncode == 0, result.stderr


def test_verify_needs_something_to_compare(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)", encoding="utf-8")
    (tmp_path / "nothing.py").write_text("", encoding="utf-8")
    for script, variables, text in (
        ("absent.py", {}, "script='absent.py' is not allowed: expected a file that exists"),
        ("fails.py", {}, "fails.py ended with exit status 3"),
        ("nothing.py", {}, "nothing.py left no recording: it called no module and no optimizer"),
        ("nothing.py", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set"),
    ):
        result = verify(tmp_path, script, **variables)
        assert result.returncode == 2
        assert text in result.stderr
