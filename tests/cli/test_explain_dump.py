"""The commands explain and dump: what they print, their exit status, and that a script runs as by itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dash_inductor.cli import main
from dash_inductor.config import config
from dash_inductor.model.reasons import Reason

PROGRAM = """
import sys
import torch
import torch.nn.functional as F
from helper import HEAD_DIM  # beside the script
from tests.support.graphs import capture, tensors

print("the script's own words", sys.argv[1:], __name__)
torch.use_deterministic_algorithms("--eager" not in sys.argv)
with capture(cpu={cpu!r}) as graphs:
    causal = graphs.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    causal(*tensors((1, 2, 64, HEAD_DIM), dtype=torch.bfloat16)).sum().backward()
{end}
"""


def script(folder: Path, *, cpu: str = "reference", head_dim: int = 64, end: str = "") -> str:
    """A script that compiles one attention as far as the joint-graph passes."""
    (folder / "helper.py").write_text(f"HEAD_DIM = {head_dim}\n")
    path = folder / "train.py"
    path.write_text(PROGRAM.format(cpu=cpu, end=end))
    return str(path)


@pytest.fixture(autouse=True)
def forget_the_helper() -> Any:
    yield
    sys.modules.pop("helper", None)


@pytest.mark.parametrize("device", ["sm_90", "h100", "H200"])
def test_explain_prints_a_table(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.argv[:], sys.path[:]
    assert main(["explain", "--arch", device, script(tmp_path), "--steps", "3"]) == 0
    out, err = capsys.readouterr()
    assert "1 of 1 attention site replaced on sm_90, 0 not replaced" in out
    assert "hopper" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "the script's own words ['--steps', '3'] __main__" in err
    assert (sys.argv, sys.path) == before


def test_explain_as_json_and_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    path = script(tmp_path, cpu="off")
    assert main(["explain", "--json", "--html", str(page), path]) == 1  # something is not replaced
    document = json.loads(capsys.readouterr().out)
    (site,) = document["graphs"][0]["sites"]
    assert site["decision"]["reason"] == "cpu_off"
    assert site["decision"]["advice"] == Reason.CPU_OFF.advice
    assert site["name"] in page.read_text()


@pytest.mark.parametrize(
    ("end", "note"),
    [
        ("raise ValueError('out of data')", "The script ended early: ValueError: out of data."),
        ("sys.exit(7)", "The script ended early: exit status 7."),
        ("sys.exit(0)", None),
    ],
)
def test_a_script_that_ends_early(end: str, note: str | None, tmp_path: Path, capsys: Any) -> None:
    assert main(["explain", "--json", script(tmp_path, end=end)]) == (note is not None)
    out, err = capsys.readouterr()
    assert json.loads(out)["notes"] == ([] if note is None else [note])
    assert ("Traceback" in err) is ("raise" in end)


PACKED = """
import torch
from torch.nn.attention.varlen import varlen_attn
torch.use_deterministic_algorithms(True)
q = torch.randn(256, 4, 64, requires_grad=True)
offsets = torch.tensor([0, 100, 256], dtype=torch.int32)
torch.compile(lambda q: varlen_attn(q, 2 * q, 3 * q, offsets, offsets, 156, 156).sum())(q).backward()
"""


def test_a_call_that_fails_here_is_explained_for_the_other_machine(tmp_path: Path, capsys: Any) -> None:
    """PyTorch has no packed attention on the CPU."""
    path = tmp_path / "packed.py"
    path.write_text(PACKED)
    assert main(["explain", "--json", "--arch", "h100", str(path)]) == 1
    document = json.loads(capsys.readouterr().out)
    (site,) = document["graphs"][0]["sites"]
    assert (site["decision"]["status"], document["unknown"]) == ("replaced", "")
    assert document["notes"][0].startswith("The script ended early: NotImplementedError")


TRAINING = """
import os, signal, torch
weight = torch.nn.Parameter(torch.zeros(1))
optimizers = [torch.optim.SGD([weight]), torch.optim.AdamW([weight])]
for step in range(4):
    weight.sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    print("step", step)
    {each}
"""


@pytest.mark.parametrize("command", ["explain", "dump", "doctor"])
@pytest.mark.parametrize(("words", "steps"), [([], 1), (["--stop-after", "2"], 2), (["--stop-after", "0"], 4)])
def test_a_script_that_trains(command: str, words: list[str], steps: int, tmp_path: Path, capsys: Any) -> None:
    """It ends where its optimizers, two of them, have made the steps; a script that makes fewer ends by itself."""
    path = script(tmp_path, end=TRAINING.format(each=""))
    words = [*words, "--once"] if command == "doctor" else [*words, *output(command, tmp_path)]
    status = main([command, "--json", *words, path])
    assert command == "doctor" or status == 0
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if line.startswith("step")] == [f"step {n}" for n in range(steps)]
    assert (f"stopped after {steps} training step" in out) is (steps < 4)


@pytest.mark.parametrize("command", ["explain", "dump", "doctor"])
def test_a_script_that_is_interrupted(command: str, tmp_path: Path, capsys: Any) -> None:
    path = script(tmp_path, end=TRAINING.format(each="os.kill(os.getpid(), signal.SIGINT)"))
    words = ["--once"] if command == "doctor" else output(command, tmp_path)
    status = main([command, *words, path])
    assert command == "doctor" or status == 1
    out, err = capsys.readouterr()
    assert "was interrupted: nothing is known about" in " ".join(out.split())
    assert "step 1" not in err
    assert "Traceback" not in err
    seen = {"explain": "1 of 1 attention site replaced", "dump": "index.html", "doctor": "sites that are replaced: 1"}
    assert seen[command] in out


def test_an_interruption_of_the_work_itself(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("dash_inductor.cli.explain.run", interrupted)
    assert main(["explain", script(tmp_path)]) == 130
    assert capsys.readouterr().err == "dash-inductor explain: interrupted\n"


def output(command: str, folder: Path) -> list[str]:
    return ["-o", str(folder / "out")] if command == "dump" else []


def test_nothing_was_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", script(tmp_path), "--eager"]) == 1
    assert "use_deterministic_algorithms(True)" in json.loads(capsys.readouterr().out)["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "script='missing.py' is not allowed: expected a file that exists"),
        (["--arch", "h900", __file__], "--arch h900 is not allowed: expected one of 'a100', "),
    ],
)
@pytest.mark.parametrize("command", ["explain", "dump"])
def test_bad_arguments(
    command: str, arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    path = script(tmp_path)
    for number in (1, 2):
        assert main(["dump", "-o", str(tmp_path / "out"), "--json", "--open", path]) == 0
        document = json.loads(capsys.readouterr().out)
        index = Path(document["index"])
        assert len(list(index.parent.glob("*/index.html"))) == number  # the same process, and so the same run
        assert len(document["graphs"]) == 1
    assert index.parent.parent == tmp_path / "out"
    assert opened[-1] == index.as_uri()
    assert main(["dump", "-o", str(tmp_path / "out"), path]) == 0
    assert capsys.readouterr().out.strip() == str(index)
    assert config.dump == ""
    assert "torch" in (index.parent / "doctor.txt").read_text(encoding="utf-8")


def test_dump_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", "-o", str(tmp_path / "out"), script(tmp_path), "--eager"]) == 1
    assert "no graph was dumped" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
