"""Copies of the package that are measured by turns: what the table says of slow, wrong, broken and hanging ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, trees
from benchmarks.shapes import SHAPES

from ..support.processes import HANGS

NAMES = [name for name in SHAPES if name.startswith("regular:d64:full")][:2]
WORKER = """
import json, os, sys, time
name = os.environ["PYTHONPATH"].split(os.pathsep)[0].rsplit(os.sep, 1)[1]
seen = set()
for line in sys.stdin:
    shape = line.strip()
    answer = {"digest": "0" if name != "wrong" else "1"}
    if shape in seen:
        answer["ms"] = (2.0 if name == "slow" else 1.0) * (4 if sys.argv[1] == "forward" else 1)
    seen.add(shape)
    if name == "broken":
        answer = {"error": "CompilationError: at 3:4"}
    if name == "ends":
        sys.exit(3)
    if name == "hangs" and "ms" in answer:
        time.sleep(10000)
    print("what a compiler says")
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("first", "slow", "wrong", "broken", "ends", "hangs"):
        (tmp_path / name / "dash_inductor" / "kernels").mkdir(parents=True)
    monkeypatch.setattr(trees.Copy.__init__, "__defaults__", (("-c", WORKER),))
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    copies = [str(folder / name) for name in names]
    monkeypatch.setattr(sys, "argv", ["trees", *copies, "--only", *NAMES, "--rounds", "2", *more])
    trees.main()
    found: dict[str, Any] = json.loads((folder / "results" / "trees.json").read_text())
    return found


def test_table(folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(monkeypatch, folders, "first", "slow", "wrong", "broken", "ends")["rows"]
    assert [row["shape"] for row in rows] == NAMES
    rate = SHAPES[NAMES[0]].flops / 1e9
    assert rows[0]["table"] == {
        "first": f"{rate:.1f} (1.000)",
        "slow": f"{rate / 2:.1f} (0.500)",
        "wrong": f"{rate:.1f} (1.000) other bits",
        "broken": "CompilationError: at 3:4",
        "ends": "ended with 3",
    }
    assert [answer["ms"] for answer in rows[1]["answers"]["slow"]] == [2.0, 2.0]
    assert "other bits" in capsys.readouterr().out


def test_forwards(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(monkeypatch, folders, "first", "slow", more=("--forward",))["rows"]
    shape = SHAPES[NAMES[0]]
    operations = 4 * shape.batch * shape.q_heads * shape.length**2 * shape.head_dim
    assert rows[0]["table"]["first"] == f"{operations / 4 / 1e9:.1f} (1.000)"


def test_one_copy_in_two_environments(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = folders / "another"
    (here / "bin").mkdir(parents=True)
    (here / "bin" / "python").symlink_to(sys.executable)
    rows = run(monkeypatch, folders, "first", f"first={here}")["rows"]
    assert rows[0]["table"]["first=another"] == rows[0]["table"]["first"]


def test_a_copy_that_hangs(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other copy may take its time, as on a machine that does something else too."""
    init = trees.Copy.__init__

    def patient(self: trees.Copy, place: trees.Place, kind: str, patience: float) -> None:
        init(self, place, kind, patience if place.name == "hangs" else HANGS)

    monkeypatch.setattr(trees.Copy, "__init__", patient)
    rows = run(monkeypatch, folders, "first", "hangs", more=("--patience", "5"))["rows"]
    assert [row["table"]["hangs"] for row in rows] == ["hangs: no answer within 5 s"] * 2
    assert rows[1]["table"]["first"].endswith("(1.000)")


@pytest.mark.parametrize(
    ("names", "more", "said"),
    [
        (("nothing",), (), "has no dash_inductor/kernels"),
        (("first", "first"), (), "different names"),
        (("first", "first=nowhere"), (), "has no bin/python"),
        (("first",), ("--rounds", "0"), "--rounds: 0 should be at least 1"),
        (("first",), ("--only", "nowhere"), "no shape has one of"),
    ],
)
def test_wrong_arguments(
    names: tuple[str, ...],
    more: tuple[str, ...],
    said: str,
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, folders, *names, more=more)
    assert said in capsys.readouterr().err + str(ended.value)
