"""`dash-inductor plan`: what it prints, what it draws, and how it refuses."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dash_inductor.cli import main, site_arguments
from dash_inductor.cli.site_arguments import Request, request
from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.hopper.calibration import CALIBRATIONS
from dash_inductor.model.mask import Band
from dash_inductor.planning import planner, prediction
from dash_inductor.planning.ranking import rank
from dash_inductor.timeline.lengths import Lengths

from ..support.processes import run_python

SHAPE = ("--shape", "1,4,2,1024,1024,128")
LARGE = ("--shape", "4,16,2,1024,1024,128")  # more CTAs than run at once


def asked(*words: str) -> Request:
    parser = argparse.ArgumentParser()
    site_arguments.add_arguments(parser)
    return request(parser.parse_args(words))


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_has_the_width_of_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    parser = argparse.ArgumentParser()
    site_arguments.add_arguments(parser)
    lines = parser.format_help().splitlines()
    assert max(map(len, lines)) <= columns
    words = site_arguments.MASKS.split()
    assert [word for line in lines for word in line.split() if word in words].count("head_interval") == 1
    assert not set(words) - {word for line in lines for word in line.split()}


def printed(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["plan", *words]) == status
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "mask", "data"),
    [
        ("full", "full", None),
        ("causal", "causal", None),
        ("causal:bottom_right", "causal:bottom_right", None),
        ("window:0,255", "band(0,255)", None),
        ("window:-7,none", "band(-7,none)", None),
        ("window:none,5:bottom_right", "band(none,5):bottom_right", None),
        ("keys", "keys(0)", None),
        ("causal+keys:300", "causal & keys(0)", Lengths(valid=(300,))),
        ("causal + documents:1000,24", "causal & segments(0,0)", Lengths(documents=(1000, 24))),
        ("documents:24,1000+keys:9+causal", "causal & segments(0,0) & keys(1)", Lengths((24, 1000), (9,))),
        ("causal+dense", "causal & dense(0)", None),
    ],
)
def test_masks(text: str, mask: str, data: Lengths | None) -> None:
    found = asked(*SHAPE, "--mask", text)
    assert (str(found.site.mask), found.data) == (mask, data)


def test_the_site() -> None:
    site = asked("--shape", "2,8,4,100,200,192,128", "--dtype", "float16", "--dropout", "0.1", "--bias-gradient").site
    assert (site.batch, site.q_heads, site.kv_heads, site.q_len, site.kv_len) == (2, 8, 4, 100, 200)
    assert (site.head_dim, site.value_dim, site.dtype, site.band) == (192, 128, "float16", Band(0))
    assert str(site.spec) == f"causal/scale={1 / math.sqrt(192)!r}/bias=0+gradient/dropout=0.1,1"
    assert asked(*SHAPE, "--bias").site.spec.bias is not None
    assert {name: asked(*SHAPE, "--arch", name).arch for name in ("h100", "h200", "a100", "l40s", "b200", "sm_86")} == {
        "h100": "sm_90", "h200": "sm_90", "a100": "sm_80", "l40s": "sm_89", "b200": "sm_100", "sm_86": "sm_86",
    }  # fmt: skip
    assert asked(*SHAPE, "--arch", "cpu").site.device == "cpu"
    assert {name: asked(*SHAPE, "--dtype", name).site.dtype for name in ("bf16", "fp16", "fp32", "float", "half")} == {
        "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "float": "float32", "half": "float16",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shape", "1,4,2"), "shape='1,4,2'.*B,Hq,Hkv,Sq,Skv,D"),
        (("--shape", "1,4,3,64,64,64"), "multiple of Hkv"),
        (("--shape", "0,4,2,64,64,64"), "numbers from 1 to 1073741823"),
        ((*SHAPE, "--mask", "diagonal"), "mask='diagonal'.*window:LO,HI"),
        ((*SHAPE, "--mask", "causal+full"), "every kind of component once"),
        ((*SHAPE, "--mask", "keys+keys"), "every kind of component once"),
        ((*SHAPE, "--mask", "window:5,1"), "LO <= HI"),
        ((*SHAPE, "--mask", "documents:5,6"), "mask='documents:5,6'.* documents: .*sum"),
        ((*SHAPE, "--mask", "keys:5,6"), "mask='keys:5,6'.* keys: 1 numbers"),
        ((*SHAPE, "--arch", "v100"), "arch='v100'.*'h100'"),
        ((*SHAPE, "--dtype", "int8"), "dtype='int8'.*'bfloat16'"),
        ((*SHAPE, "--dropout", "1.5"), "dropout=1.5"),
    ],
)
def test_bad_arguments_are_named(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        asked(*words)
    assert re.search(message, str(error.value), re.DOTALL)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--schedule", "shift"), "--schedule shift is not allowed"),
        (("--timeline", "a.html"), r"--timeline a.html .* ends with one of \.svg, \.png, \.json, \.txt"),
        (("--draw", "spt"), "beside --timeline"),
        (("--measured", "run.json"), "beside --timeline"),
        (("--workers", "0"), "--workers 0 is not"),
        (("--workers", "4097", "--timeline", "x.svg"), "--workers 4097 is not"),
        (("--workers", "16"), "--workers 16 is not allowed: expected an argument beside --timeline"),
        (("--timeline", "."), r"--timeline \. is not"),
    ],
)
def test_bad_arguments_of_the_command(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert main(["plan", *SHAPE, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err)


def test_a_recorded_run_is_read_before_the_simulation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", *SHAPE, "--timeline", str(tmp_path / "x.txt"), "--measured", "run.json"]) == 2
    assert re.fullmatch("dash-inductor plan: --measured run.json is not allowed: .*\n", capsys.readouterr().err)


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan, and every candidate with the reason why it lost, in at most 100 columns."""
    out = printed(capsys, *SHAPE)
    assert max(map(len, out.splitlines())) <= 100
    found = asked(*SHAPE)
    plan = planner.plan(found.site, "sm_90")
    words = " ".join(out.split())
    for fact in (
        str(plan),
        "1 x 4 heads on 2 of 1024 tokens, head dim 128, causal, bfloat16, on H100 (sm_90)",
        "schedule bent_fold",
    ):
        assert fact in words
    assert plan.numerics_key in re.sub(r"\n +", "", out)
    starred = [line for line in out.splitlines() if line.startswith("  *  ")]
    assert [line.split()[1:3] for line in starred] == [[plan.schedule, plan.kernel]]
    rows = [line.split()[:2] for line in out.splitlines() if line.startswith("   ")]
    for candidacy in rank(found.site, "sm_90"):
        if not candidacy.chosen and candidacy.schedule is not None:
            assert [candidacy.schedule, candidacy.kernel] in rows


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    document: dict[str, Any] = json.loads(printed(capsys, *SHAPE, "--json"))
    found = asked(*SHAPE)
    plan = planner.plan(found.site, "sm_90")
    assert document["plan"]["text"] == str(plan)
    assert document["plan"]["numerics_key"] == plan.numerics_key
    assert (document["arch"], document["fallback"], document["timelines"]) == ("sm_90", None, [])
    ranking = rank(found.site, "sm_90")
    assert [c["why"] for c in document["candidates"]] == [c.why for c in ranking]
    assert [c["predicted_us"] for c in document["candidates"]] == [c.predicted_us for c in ranking]


def test_predictions_are_for_the_gpu_that_was_named_if_it_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(name: str) -> tuple[str, float]:
        document = json.loads(printed(capsys, *LARGE, "--json", "--arch", name))
        (time,) = (c["predicted_us"] for c in document["candidates"] if c["chosen"])
        return document["measured_on"], time

    found = asked(*LARGE)
    time = prediction.predicted_us(planner.plan(found.site, "sm_90"), found.site, "sm_90", "H200")
    assert [said(name) for name in ("h100", "h200", "sm_90")] == [("H200", time)] * 3
    end = "* chosen; predicted: the backward of this site on"
    for name, device in {
        "h100": "H100, from times measured on H200",
        "H200": "H200",
        "sm_90": "sm_90, from times measured on H200",
        "a100": "A100",
        "cpu": "cpu",
    }.items():
        assert printed(capsys, *LARGE, "--arch", name).endswith(f"{end} {device}\n")
    h200 = CALIBRATIONS["H200"]
    measured = replace(h200, launch=h200.launch + 1000.0)
    monkeypatch.setitem(CALIBRATIONS, "H100", measured)
    assert said("h100") == ("H100", pytest.approx(time + 1000.0))
    assert said("h200") == ("H200", time)


def test_documents_whose_lengths_are_said_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    def chosen(mask: str) -> Any:
        document = json.loads(printed(capsys, *LARGE, "--json", "--mask", mask))
        return next(c["predicted_us"] for c in document["candidates"] if c["chosen"])

    assert chosen("causal+documents") is None
    assert chosen("causal+documents:512,512") < chosen("causal+documents:1000,24")


@pytest.mark.parametrize(
    "words",
    [
        ("--shape", "1,1,1,100000000,100000000,128"),
        ("--shape", "1,100000000,1,128,128,128"),
        ("--shape", "1,1,1,1000000,1000000,128", "--mask", "causal+documents:1000000"),
    ],
    ids=["tokens", "heads", "documents"],
)
def test_what_is_too_large_has_a_plan_without_a_prediction(words: tuple[str, ...], capsys: Any, tmp_path: Path) -> None:
    """At once, and a timeline is refused in words about what was typed, after a line about what is simulated."""
    assert re.search("backward unknown: .* too many to", " ".join(printed(capsys, *words).split()))
    assert main(["plan", *words, "--timeline", str(tmp_path / "a.txt")]) == 2
    out, err = capsys.readouterr()
    simulating, refused = err.splitlines()
    assert simulating.startswith("simulating hopper ")
    assert refused.startswith(
        f"dash-inductor plan: --shape {words[1]} is not allowed: expected a timeline with at most "
    )
    assert (out, list(tmp_path.iterdir())) == ("", [])


def test_a_named_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(capsys, *SHAPE, "--json", "--schedule", "spt"))["plan"]["schedule"] == "spt"


def test_a_site_that_no_kernel_covers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wide = ("--shape", "1,4,2,1024,1024,520", "--arch", "a100")
    out = printed(capsys, *wide, status=1)
    assert "not replaced No kernel for this device and dtype has this head dimension" in " ".join(out.split())
    drawn = tmp_path / "a.svg"
    document = json.loads(printed(capsys, *wide, "--json", "--timeline", str(drawn), status=1))
    assert (document["plan"], document["fallback"]["reason"], document["timelines"]) == (None, "head_dim", [])
    assert not drawn.exists()


def test_timelines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recorded = tmp_path / "run.json"
    span = {"sm": 0, "work_id": 0, "head": 3, "kv": 0, "q": 0, "start": 0, "wait": 900, "added": 1000, "end": 1150}
    recorded.write_text(json.dumps({"unit": "ns", "spans": [span], "meta": {}}))
    image, trace = tmp_path / "a.svg", tmp_path / "a.json"
    out = printed(
        capsys, *SHAPE, "--timeline", str(image), "--timeline", str(trace), "--draw", "bent_fold,spt",
        "--measured", str(recorded), "--workers", "16",
    )  # fmt: skip
    assert all(f"drawn: {path}" in out for path in (image, trace))
    text = image.read_text(encoding="utf-8")
    assert "Backward of 1 x 4 heads on 2 of 1024 tokens" in text
    assert "16 workers; the first run was recorded on a GPU" in text
    names = [e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert names[0].startswith("measured, measured, real run: ")
    assert {name.split(",")[0] for name in names[1:]} == {"bent_fold", "spt"}
    assert [name.split(":")[0] for name in names if "chosen" in name] == ["bent_fold, simulated, chosen"]
    assert "bent_fold  ·  chosen" in text


def test_without_torch() -> None:
    """The command plans for any architecture on any machine: torch is not even imported."""
    words = [*SHAPE, "--mask", "causal+documents:600,424", "--json"]
    run_python(
        f"""
        import sys
        from dash_inductor.cli import main, site_arguments

        assert main(["plan", *{words!r}]) == 0
        assert "torch" not in sys.modules
        """
    )
