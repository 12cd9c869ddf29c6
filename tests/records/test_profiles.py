"""Profiles without a GPU: which calls are recorded, what is made of their times, and the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dash_inductor
from dash_inductor.records import profiles

from ..support.distribution import ROOT

CPU = torch.device("cpu")
PAIR = 32  # bytes


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables lie on the CPU; nothing is registered for the end of this process, and warnings come anew."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(profiles.atexit, "register", lambda function: None)
    profiles.warn.cache_clear()
    profiles._announce.cache_clear()
    profiles.clear_profile_runs()
    yield
    profiles.clear_profile_runs()
    profiles._announce.cache_clear()


def begin(site: str = "site", key: object = 0, heads: int = 2, kv_tiles: int = 2, q_tiles: int = 3) -> Any:
    return profiles.begin(site, key, heads, kv_tiles, q_tiles, CPU, {"plan": "a plan"})


def filled() -> profiles.ProfileRun:
    """On SM 7, of head 1 and kv tile 0, by CTA 5, q tiles 2 and 0; of head 0 and kv tile 1, by CTA 4, q tile 1."""
    run: profiles.ProfileRun = begin()
    table = run.table
    table[1, 0, 0, :2] = torch.tensor([5, 7])
    table[1, 0, 1 + 2] = torch.tensor([1000, 1320, 1640, 1960])
    table[1, 0, 1 + 0] = torch.tensor([1352, 1672, 1640, 2312])  # the stamper was late
    table[0, 1, 0, :2] = torch.tensor([4, 7])
    table[0, 1, 1 + 1] = torch.tensor([1064, 1384, 1384, 1704])
    run.end()
    return run


def test_spans() -> None:
    """Sorted, in nanoseconds since the first start; no time of a pair is after the next one."""
    found = filled().to_dict()
    assert found["unit"] == "ns"
    names = ("sm", "work_id", "head", "kv", "q", "start", "wait", "added", "end")
    rows = [tuple(span[name] for name in names) for span in found["spans"]]
    assert rows == [
        (7, 5, 1, 0, 2, 0, 320, 640, 960),
        (7, 4, 0, 1, 1, 64, 384, 384, 704),
        (7, 5, 1, 0, 0, 352, 640, 640, 1312),
    ]
    assert all(tuple(span) == names for span in found["spans"])
    meta = {"site": "site", "number": 1, "heads": 2, "heads_of_call": 2, "tick": 32, "plan": "a plan"}
    assert found["meta"] == meta
    assert json.loads(json.dumps(found)) == found


def test_a_call_without_steps() -> None:
    run = begin()
    run.end()
    assert run.to_dict()["spans"] == []


def test_the_first_calls_of_every_site() -> None:
    """Sites of one name that differ in the key are told apart, but their calls are counted together."""
    for _ in range(profiles.CALLS):
        assert begin("a") is not None
        assert begin("b") is not None
    assert begin("a") is None
    assert begin("b") is None
    assert begin("a", key=1) is not None
    found = [(run.site, run.number) for run in dash_inductor.profile_runs()]
    assert found == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3), ("a", 4)]
    dash_inductor.clear_profile_runs()
    assert dash_inductor.profile_runs() == ()
    assert begin("a").number == 1


def test_room_for_some_heads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    a_head = 2 * (1 + 3) * PAIR
    for room, heads in ((5 * a_head, 4), (4 * a_head, 4), (4 * a_head - 1, 3), (a_head, 1)):
        monkeypatch.setattr(profiles, "BYTES_OF_A_CALL", room)
        run = begin(key=room, heads=4)
        assert run.table.shape == (heads, 2, 4, 4)
        assert run.bytes == heads * a_head
        assert (run.heads, run.meta["heads_of_call"]) == (heads, 4)
    caplog.clear()
    monkeypatch.setattr(profiles, "BYTES_OF_A_CALL", a_head - 1)
    assert begin(key="none") is None
    assert caplog.messages == ["site: not profiled: the 2 x 3 tile pairs of a head are too many"]


def test_room_for_some_calls(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Recorded calls stay; a call without room is named once."""
    monkeypatch.setattr(profiles, "BYTES_OF_ALL", 2 * 2 * 2 * (1 + 3) * PAIR)
    assert begin("a") is not None
    assert begin("b") is not None
    caplog.clear()
    assert begin("c") is None
    assert begin("c") is None
    assert caplog.messages == ["from c on nothing is profiled: 0 MiB of times have been recorded"]
    assert [run.site for run in profiles.profile_runs()] == ["a", "b"]
    profiles.clear_profile_runs()
    assert begin("c") is not None


def test_graphs_are_not_recorded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert begin() is None
    assert begin() is None
    assert caplog.messages == ["calls that a CUDA graph records are not profiled, and neither are its replays"]


def test_the_first_recording_says_where(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    begin("a")
    begin("b")
    (message,) = caplog.messages
    assert message.endswith(f"written to {Path('dash_inductor_profile/rank3')} when the process ends")


def test_files(tmp_path: Path) -> None:
    runs = [filled(), begin(""), begin("../odd name")]
    paths = dash_inductor.write_profiles(tmp_path / "new" / "folder")
    assert [path.relative_to(tmp_path / "new/folder").name for path in paths] == [
        "site-1.json", "call-1.json", ".._odd_name-1.json",
    ]  # fmt: skip
    assert [json.loads(path.read_text()) for path in paths] == [run.to_dict() for run in runs]


@pytest.mark.parametrize(("rank", "folder"), [("2", "rank2"), ("", "pid"), ("../x", "pid")])
def test_the_default_folder(rank: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", rank)
    begin()
    (path,) = dash_inductor.write_profiles()
    assert path == Path("dash_inductor_profile", folder if rank == "2" else f"pid{os.getpid()}", "site-1.json")
    assert path.is_file()


PROGRAM = """
import sys
import torch
torch.cuda.is_current_stream_capturing = lambda: False
import dash_inductor
from dash_inductor.records import profiles
for site in ("a", "b"):
    profiles.begin(site, 0, 1, 1, 1, torch.device("cpu"), {}).end()
if "write" in sys.argv:
    dash_inductor.write_profiles("mine")
    profiles.begin("c", 0, 1, 1, 1, torch.device("cpu"), {}).end()
"""


@pytest.mark.parametrize(("write", "files"), [("", ["a-1", "b-1"]), ("write", ["c-1"])])
def test_the_end_of_a_process(write: str, files: list[str], tmp_path: Path) -> None:
    """Profiles that were not written yet are written, and the last line says where."""
    environ = {**os.environ, "RANK": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, write]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    folder = tmp_path / "dash_inductor_profile/rank0"
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.json" for name in files]
    assert done.stderr.splitlines()[-1].endswith(f"the profiles of {len(files)} calls were written to {folder}")
