"""Runs of different layouts: what rounding explains, and what it does not."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import dash_guard
from dash_guard.cli import main
from dash_guard.errors import RecordingError
from dash_guard.recordings import layouts
from dash_guard.recordings.compare import compare
from dash_guard.recordings.layouts import LayoutComparison, Rounding, compare_layouts, path_of
from dash_inductor.errors import ArgumentError
from tests.support.distribution import ROOT
from tests.support.processes import HANGS

from .support.layouts import STEPS, batch, model

Setting = dict[str, float]


def width(dtype: torch.dtype) -> nn.Sequential:
    """A model with a gradient that is zero but for rounding: softmax does not see the bias of the scores."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            scores = torch.softmax(self.key(x) @ x.T, 0)  # a bias adds the same to a column
            return scores.T @ self.value(x)

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Scores()).to(dtype)


def run(
    folder: Path,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    optimizer: str = "SGD",
    compiled: bool = False,
    autocast: bool = False,
    divide: bool = True,
    wrong_from: int = 1,
    lr: float = 0.1,
    seed: int = 0,
    drop: bool = False,
    steps: int = STEPS,
    broken: str = "",
    value: float = 0.0,
) -> Path:
    """Trains and records. From step `wrong_from` on, a gradient has `value`, or it is the learning rate (`broken`)."""
    whole = model().to(dtype)
    if seed:
        torch.manual_seed(seed)
        nn.init.normal_(whole[0].weight)
    forward: Callable[[Tensor], Tensor] = torch.compile(whole, backend="aot_eager") if compiled else whole
    update = getattr(torch.optim, optimizer)(whole.parameters(), lr=lr)
    with dash_guard.record(folder, values=True):
        for step in range(1, steps + 1):
            parts = list(batch(step).to(dtype).chunk(micro_batches))
            wrong = step >= wrong_from
            for part in parts[: -1 if drop and wrong else None]:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = forward(part).float().square().mean()
                (loss if not divide and wrong else loss / micro_batches).backward()
            if broken == "gradient" and wrong and whole[0].weight.grad is not None:
                whole[0].weight.grad[1, 2] = value
            if broken == "parameter" and wrong:
                update.param_groups[0]["lr"] = value
            update.step()
            update.zero_grad()
    return folder


DTYPES = {
    "float64": {"dtype": torch.float64},
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": True},
}
ALIKE = {
    "micro-batches": {"micro_batches": 4},
    "compiled": {"compiled": True},
    "both": {"micro_batches": 2, "compiled": True},
}
WRONG = {
    "not divided": ({"micro_batches": 4, "divide": False}, r"gradients of b are (4|4\.0.|3\.9.) times those of a"),
    "not divided by 2": ({"micro_batches": 2, "divide": False}, r"gradients of b are (2|2\.0.|1\.9.) times those of a"),
    "a micro-batch is lost": ({"micro_batches": 4, "drop": True}, "gradients"),
    "another start": ({"seed": 3}, "the runs start from different parameters"),
    "another learning rate": ({"lr": 0.2}, r"updates of b are (2|2\.0.|1\.9.) times those of a"),
}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("layout", ALIKE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_that_agree(dtype: str, layout: str, optimizer: str, tmp_path: Path) -> None:
    common = {**DTYPES[dtype], "optimizer": optimizer, "lr": 0.01}
    a, b = run(tmp_path / "a", **common), run(tmp_path / "b", **common, **ALIKE[layout])
    result = compare_layouts(a, b)
    assert result.verdict == "within rounding", (result.conclusion, result.tensors)
    assert [step.step for step in result.steps] == [1, 2, 3, 4]
    assert result.rounding is not None
    assert result.rounding.dtype == {"autocast": "bfloat16"}.get(dtype, dtype)
    if "micro_batches" in ALIKE[layout]:
        assert compare(a, b).verdict == "diverged"  # by bits
        assert any(step.gradients for step in result.steps)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_rounding(dtype: str, wrong: str, optimizer: str, tmp_path: Path) -> None:
    settings, words = WRONG[wrong]
    common = {**DTYPES[dtype], "optimizer": optimizer, "lr": 0.1}
    a, b = run(tmp_path / "a", **common), run(tmp_path / "b", **{**common, **settings})
    result = compare_layouts(a, b)
    assert result.verdict == "beyond rounding"
    assert re.search(words, result.conclusion), result.conclusion
    assert result.deciding == 1
    if wrong == "another learning rate":
        assert f"{optimizer}.0 lr 0.2 instead of 0.1" in result.conclusion


@pytest.mark.parametrize("wrong_from", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_begins_later(dtype: str, wrong_from: int, tmp_path: Path) -> None:
    a = run(tmp_path / "a", **DTYPES[dtype])
    result = compare_layouts(a, run(tmp_path / "b", 4, divide=False, wrong_from=wrong_from, **DTYPES[dtype]))
    assert (result.verdict, result.deciding, len(result.steps)) == ("beyond rounding", wrong_from, STEPS)
    assert f"In step {wrong_from}, gradients of b are " in result.conclusion


@pytest.mark.parametrize("wrong_from", [1, 3])
@pytest.mark.parametrize("broken", ["gradient", "parameter"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_not_finite(
    value: float, broken: str, wrong_from: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"broken": broken, "value": value, "wrong_from": wrong_from}
    run(tmp_path / "healthy")
    run(tmp_path / "a", **wrong)
    shutil.copytree(tmp_path / "a", tmp_path / "same")
    assert compare_layouts(tmp_path / "a", tmp_path / "same").verdict == "within rounding"
    for a, b in (("healthy", "a"), ("a", "healthy")):
        result = compare_layouts(tmp_path / a, tmp_path / b)
        words = "gradients have" if broken == "gradient" else "gradients agree, and parameters have"
        assert result.conclusion.startswith(
            f"In step {wrong_from}, {words} elements that are NaN or infinite in one run"
        )
        assert (result.verdict, result.deciding) == ("beyond rounding", wrong_from)
        assert ("the first one in 0.weight" in result.conclusion) == (broken == "gradient")
    assert main(["compare", "--layouts", "--json", str(tmp_path / "healthy"), str(tmp_path / "a")]) == 1
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # NaN and Infinity are no JSON


def test_a_gradient_that_is_zero_but_for_rounding(tmp_path: Path) -> None:
    for name, dtype in (("a", torch.float32), ("b", torch.float64)):
        whole = width(dtype)
        optimizer = torch.optim.AdamW(whole.parameters(), lr=0.001)
        with dash_guard.record(tmp_path / name, values=True):
            for step in range(1, 4):
                whole(batch(step).to(dtype)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    result = compare_layouts(tmp_path / "a", tmp_path / "b")
    zero = next(each for each in result.tensors if each.tensor == "2.key.bias")
    assert zero.relative > 0.1
    assert not zero.beyond
    assert result.verdict == "within rounding", result.conclusion


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    command = [sys.executable, "-m", "guard.tests.support.layouts", str(folder)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS, check=False)
    assert found.returncode == 0, found.stderr
    run(folder / "one")
    return folder


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp"])
def test_other_numbers_of_ranks(layout: str, spread: Path) -> None:
    one, several = spread / "one", spread / layout
    assert compare(one, several).verdict == "not comparable"
    assert "compare --layouts" in compare(one, several).conclusion
    for result in (compare_layouts(one, several), compare_layouts(several, one)):
        assert result.verdict == "within rounding", result.conclusion
        assert {each.tensor for each in result.tensors} <= {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert len(result.steps) == STEPS
    of_rank = [path.name for path in (several / "values").glob("step0000000001.*")]
    assert of_rank == ["step0000000001.rank00000.pt"]


def test_layouts_of_several_ranks_that_are_wrong(spread: Path) -> None:
    added = compare_layouts(spread / "one", spread / "ddp sum")
    assert (added.verdict, added.deciding) == ("beyond rounding", 1)
    assert "gradients of b are 2 times those of a" in added.conclusion
    bias = compare_layouts(spread / "one", spread / "tp wrong bias")
    assert bias.verdict == "beyond rounding"
    assert bias.tensors[0].beyond


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = run(tmp_path / "a"), run(tmp_path / "b", 4), run(tmp_path / "c", 4, divide=False)
    for other, code, head in ((b, 0, "The runs agree"), (c, 1, "The runs differ by more")):
        assert main(["compare", "--layouts", str(a), str(other)]) == code
        text = capsys.readouterr().out
        assert text.startswith(head)
        assert "Relative differences by step" in text
        assert all(len(line) <= 100 for line in text.splitlines() if str(tmp_path) not in line)
        assert main(["compare", "--json", "--layouts", str(a), str(other)]) == code
        content = json.loads(capsys.readouterr().out)
        assert (content["exit_code"], content["verdict"]) == (code, compare_layouts(a, other).verdict)
        page, junit = tmp_path / "page.html", tmp_path / "bits.xml"
        assert main(["compare", "--layouts", "--html", str(page), "--junit", str(junit), str(a), str(other)]) == code
        text, html, case = capsys.readouterr().out.rstrip("\n"), page.read_text(), ElementTree.parse(junit).getroot()[0]
        assert text.splitlines()[0] in html
        assert html.count("<polyline") == 2 + 3  # those of losses
        assert html.count("<tr>") == 3 + (1 + len(content["steps"])) + (1 + len(content["tensors"]))
        assert (case[0].tag, case[0].text) == ("failure" if code else "system-out", text)


def test_the_page_of_runs_that_differ_shows_how_much(tmp_path: Path) -> None:
    """Where both have values; the page stands alone."""
    a, b, without, page = run(tmp_path / "a"), run(tmp_path / "b", 4), tmp_path / "without", tmp_path / "page.html"
    shutil.copytree(b, without, ignore=shutil.ignore_patterns("values"))
    for other, shown in ((b, True), (without, False), (a, False)):
        assert main(["compare", "--html", str(page), str(a), str(other)]) == (other != a)
        html = page.read_text()
        assert ("Relative differences by step" in html) is (html.count("<polyline") > 3) is shown
        assert not any(word in html for word in ("http:", "https:", "src=", "href=", "<script", "@import", "url("))


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    with dash_guard.record(tmp_path / "bits"):
        whole = model()
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        whole(batch(1)).sum().backward()
        optimizer.step()
    with pytest.raises(RecordingError, match="it has no values"):
        compare_layouts(a, tmp_path / "bits")
    with pytest.raises(ArgumentError, match="a folder with a recording"):
        compare_layouts(a, tmp_path / "nothing")
    b = run(tmp_path / "b")
    path = path_of(b, 0, 1)
    content = torch.load(path, weights_only=True)
    content["gradient"]["0.bias"] = content["gradient"]["0.bias"][:8]
    del content["parameter"]["2.bias"]
    torch.save(content, path)
    result = compare_layouts(a, b)
    assert result.verdict == "not comparable"
    assert any("gradient 0.bias has the shapes [16] and [8]" in reason for reason in result.reasons)
    assert "only a has parameter 2.bias" in result.reasons
    for damaged in (b"", b"PK\3\4", path.read_bytes()[:100]):
        path.write_bytes(damaged)
        with pytest.raises(RecordingError, match="it cannot be read"):
            compare_layouts(a, b)
    torch.save({"gradient": [1]}, path)
    with pytest.raises(RecordingError, match="it cannot be read"):
        compare_layouts(a, b)
    path.unlink()
    late = compare_layouts(a, b)
    assert (late.verdict, late.steps[0].step) == ("within rounding", 2)


def test_values_change_no_bit(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), tmp_path / "b"
    whole = model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    with dash_guard.record(b):
        for step in range(1, STEPS + 1):
            (whole(batch(step)).float().square().mean() / 1).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert compare(a, b).verdict == "equal"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_units_in_the_last_place(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, -1.0, 0.0], dtype=dtype)
    after = torch.nextafter(one.float(), torch.full((3,), 9.0)).to(dtype) if dtype == torch.float32 else None
    if after is not None:
        assert layouts._ulps(one, after) == 1
    assert layouts._ulps(one, -one) > 1000
    assert layouts._ulps(torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype)) == 0


def test_bounds_follow_the_dtype() -> None:
    bounds = [Rounding.of(dtype, 4) for dtype in ("float64", "float32", "float16", "bfloat16")]
    assert bounds == sorted(bounds, key=lambda each: each.relative)
    assert isinstance(LayoutComparison("a", "b").to_dict()["steps"], list)
