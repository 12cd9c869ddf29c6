"""Recordings from untrusted places: whatever a file holds, there is an outcome or a `RecordingError`, and soon."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dash_guard.cli import main
from dash_guard.errors import RecordingError
from dash_guard.recorder.steps import StepWriter
from dash_guard.recordings import frames, junit, limits, page, report, schema
from dash_guard.recordings.compare import Comparison, compare
from dash_guard.recordings.file import ENTRY, HEAD, MAGIC, Appender, Name, path_of
from dash_guard.recordings.losses import losses, sections
from dash_guard.recordings.recording import Recording
from dash_inductor import untrusted as _untrusted
from dash_inductor.errors import ArgumentError

from ..support.recordings import END, NAME, environment, frame, named, objects, sound, step

Crafted = Callable[[Path], object]
"""Makes something where the file of rank 0 is expected."""

START = MAGIC + objects(environment())
FINDING = {
    "type": "finding", "step": 1, "phase": "gradient", "tensor": "w", "groups": [[0], [1]], "minority": [],
    "differing": 1,
}  # fmt: skip
EVIL = "w\x1b[2J\x07\x7f\x9b31m\u202eabc\u2066\u2028\ud800\r\n<b>"
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
"""Characters that must not be printed; newlines are between lines."""


def content(made: bytes) -> Crafted:
    return lambda path: path.write_bytes(made)


def started(*parts: bytes) -> Crafted:
    """A file that begins as it should."""
    return content(START + b"".join(parts))


def first(**facts: Any) -> Crafted:
    """A file whose first frame has other facts."""
    return content(MAGIC + objects({**environment(), **facts}) + END)


def sparse(start: bytes, size: int) -> Crafted:
    def make(path: Path) -> None:
        path.write_bytes(start)
        os.truncate(path, size)

    return make


def zeros(count: int) -> Crafted:
    """A step of so many fingerprints, sound to its checksum, of which the disk holds the beginning."""
    whole = step(1, *[0] * count)
    return sparse(START + named(NAME) + whole[: HEAD.size + 9], len(START + named(NAME) + whole))


def bind(path: Path) -> None:
    """A socket; its name may be too long for the path."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def twice(path: Path) -> None:
    path.write_bytes(sound())
    path.with_name("rank0.dash").write_bytes(sound())


def many(count: int) -> list[tuple[str, str, str]]:
    return [("input", str(number), "int8 []") for number in range(count)]


REFUSED: dict[str, tuple[Crafted, str]] = {
    # what is no regular file
    "fifo": (os.mkfifo, "this is a FIFO"),
    "directory": (os.mkdir, "this is a directory"),
    "socket": (bind, "it cannot be read"),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), "this is a device"),
    "terminal": (lambda path: path.symlink_to("/dev/tty"), r"this is a device|it cannot be read"),
    "symbolic links in a circle": (lambda path: path.symlink_to(path), "it cannot be read: Too many levels"),
    "symbolic link to nothing": (lambda path: path.symlink_to("nothing"), "it cannot be read: No such file"),
    # names of files
    "rank without digits": (lambda path: path.with_name("rankx.dash").write_bytes(sound()), "no name of the file"),
    "rank in other digits": (
        lambda path: path.with_name("rank\u0660\u0660\u0660\u0660\u0660.dash").touch(),
        "no name of the file",
    ),
    "huge rank": (lambda path: path.with_name(f"rank{'9' * 200}.dash").touch(), "no name of the file"),
    "rank beyond the limit": (lambda path: path.with_name("rank9999999.dash").touch(), "no name of the file"),
    "name with escapes": (lambda path: path.with_name("rank\x1b[2J.dash").touch(), r"rank\\x1b\[2J\.dash: no name of"),
    "two files of a rank": (twice, "no name of the file"),
    # the beginning
    "other magic": (content(b"PK\3\4" + bytes(100)), "no recording that this version"),
    "other version": (content(sound().replace(b"recording 3", b"recording 4")), "no recording that this version"),
    "no environment": (content(MAGIC + named(NAME) + step(1, 0) + END), "no environment"),
    "a step first": (content(MAGIC + step(1)), "no environment"),
    "two environments": (started(objects(environment())), "a second environment"),
    "another rank": (first(rank=1, world_size=2), "a recording of rank 1"),
    "a rank that does not exist": (first(rank=3), "rank 3 of 1 ranks"),
    "negative rank": (first(rank=-1), "rank=-1"),
    "truth value as rank": (first(rank=False), "rank=False"),
    "huge world": (first(world_size=10**18), "world_size=1000000000000000000"),
    "no ranks": (first(world_size=0), "world_size=0"),
    "every is a text": (first(every="1"), "every='1'"),
    "no rank": (content(MAGIC + objects({"type": "environment", "world_size": 1, "every": 1})), "without rank"),
    "unknown fact": (first(colour="red"), "with 'colour'"),
    "nested facts": (first(gpu={"name": [1]}), r"'name'=\[1\]"),
    "facts that are a list": (first(gpu=[]), r"gpu=\[\]"),
    "too many facts": (first(environment=dict.fromkeys(map(str, range(10_001)))), "10001 facts"),
    "long fact": (first(environment={"A": "x" * (limits.FACT + 1)}), "131073 characters"),
    # JSON
    "header that is a list": (content(MAGIC + objects([1, 2])), "no object"),
    "header that is a number": (content(MAGIC + objects("7")), "no object"),
    "unknown type": (started(objects({"type": "surprise"})), "type 'surprise'"),
    "type that is a list": (started(objects({"type": []})), r"type \[\]"),
    "not UTF-8": (started(objects(b'{"type": "end\xff"}')), "no JSON"),
    "UTF-16": (started(objects('{"type": "end"}'.encode("utf-16"))), "no JSON"),
    "no JSON": (started(objects("{")), "no JSON"),
    "NaN": (first(gpu={"memory": float("nan")}), "NaN"),
    "infinity": (first(gpu={"memory": float("inf")}), "Infinity"),
    "number that overflows": (content(MAGIC + objects('{"type": "end", "x": 1e999}')), "not finite"),
    "huge integer": (content(MAGIC + objects(f'{{"rank": {"9" * 5000}}}')), "an integer of 5000 characters"),
    "deep JSON": (started(objects("[" * 100_000)), "no JSON"),
    "repeated key": (started(objects('{"type": "facts", "type": "end"}')), "the key 'type' is there twice"),
    "as much JSON as is parsed": (started(objects(b"[" + b"1.5," * (limits.VALUES - 1) + b"1]")), "no object"),
    "wide JSON": (started(objects(b"[" + b"[]," * (limits.VALUES + 1))), "values"),
    # state
    "state without a step": (started(objects({"type": "state", "values": {}})), "without step"),
    "state of no step": (started(objects({"type": "state", "step": 0, "values": {}})), "step=0"),
    "nested state": (started(objects({"type": "state", "step": 1, "values": {"x": [1]}})), r"'x'=\[1\]"),
    "state of an earlier step": (
        started(objects({"type": "state", "step": 2, "values": {}}, {"type": "state", "step": 1, "values": {}})),
        "step 1 after step 2",
    ),
    "more and more state": (
        started(
            objects(
                *(
                    {"type": "state", "step": 1, "values": dict.fromkeys(map(str, range(start, start + 6000)))}
                    for start in (0, 6000)
                )
            )
        ),
        "more than 10000 values of state",
    ),
    # losses
    "loss without a value": (started(objects({"type": "loss", "step": 1})), "without value"),
    "loss of no step": (started(objects({"type": "loss", "step": 0, "value": 1})), "step=0"),
    "loss that is a text": (started(objects({"type": "loss", "step": 1, "value": "1"})), "value='1', where a number"),
    "loss that is true": (started(objects({"type": "loss", "step": 1, "value": True})), "value=True"),
    "loss that is a list": (started(objects({"type": "loss", "step": 1, "value": ["nan"]})), r"value=\['nan'\]"),
    "loss of an earlier step": (
        started(objects(*({"type": "loss", "step": step, "value": 0.5} for step in (2, 1)))),
        "step 1 after step 2",
    ),
    # frames
    "sparse frame": (sparse(START + HEAD.pack(1 << 31, 0), 3 << 30), "a frame of 2147483648 bytes"),
    "too long a frame": (started(frame(b"J" + bytes(limits.FRAME))), "a frame of 16777217 bytes"),
    "other kind of frame": (started(frame(b"X")), "a frame of kind b'X'"),
    "frame after the end": (content(sound() + step(9, 0)), "after the end"),
    "bytes after the end": (content(sound() + b"\0"), "after the end"),
    # names
    "names that are none": (started(objects({"type": "names", "names": [[1, 2, 3]]})), "phase=1"),
    "names of two parts": (started(objects({"type": "names", "names": [["input", "x"]]})), "phase, tensor and desc"),
    "no names": (started(named()), "names of 0 elements"),
    "unknown phase": (started(named(("prologue", "x", ""))), "phase='prologue'"),
    "name twice": (started(named(NAME), named(NAME)), "a second time"),
    "name of 1 MB": (started(named(("input", "x" * 10**6, ""))), "1000000 characters"),
    "description of 1 MB": (started(named(("input", "x", "x" * 10**6))), "1000000 characters"),
    "name with escapes twice": (started(named(("input", EVIL, ""), ("input", EVIL, ""))), r"w\\x1b\[2J\\x07\\x7f"),
    # steps
    "short step": (started(frame(b"S12345")), "a step in 6 bytes"),
    "count too high": (started(named(NAME), step(1, 0, count=2)), "2 fingerprints of step 1 in 20 bytes"),
    "count too low": (started(named(NAME), step(1, 0, count=0)), "0 fingerprints of step 1 in 20 bytes"),
    "huge count": (started(named(NAME), step(1, 0, count=2**32 - 1)), "4294967295 fingerprints"),
    "unknown name": (started(named(NAME), step(1, 1)), "name 1 in step 1"),
    "step before its names": (started(step(1, 0)), "1 fingerprints in step 1"),
    "step 0": (started(step(0)), "step 0 after step 0"),
    "step 0 after others": (started(step(1), step(0)), "step 0 after step 1"),
    "steps out of order": (started(named(NAME), step(2, 0), step(1, 0)), "step 1 after step 2"),
    "a name three times": (started(named(*many(2)), step(1, 0, 0), step(1, 0)), "3 times in step 1"),
    "sparse step": (zeros(500_000), "500000 fingerprints in step 1"),
    # the rest
    "finding of one group": (started(objects({**FINDING, "groups": [[0]]})), "groups of 1 elements"),
    "finding of texts": (started(objects({**FINDING, "groups": [["a"], [1]]})), "element of groups='a'"),
    "finding about others": (started(objects(FINDING)), "rank 1 of 1"),
    "finding of twins": (started(objects({**FINDING, "groups": [[0], [0]]})), "each rank is allowed once"),
    "finding of a wrong minority": (started(objects({**FINDING, "minority": [7]})), r"minority=\[7\]"),
    "finding without a tensor": (started(objects({"type": "finding", "step": 1})), "without phase"),
    "unseen without a reason": (started(objects({"type": "unseen", "name": "x"})), "without reason"),
    "numerics keys that are numbers": (started(objects({"type": "facts", "numerics_keys": [1]})), "numerics_keys=1"),
    "end that says more": (started(objects({"type": "end", "why": 1})), "with 'why'"),
}

CUT_OFF: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 0),
    "a part of the magic": (MAGIC[:9], 0),
    "no frame": (MAGIC, 0),
    "a part of a head": (START + b"\x07\0\0", 0),
    "a head alone": (START + HEAD.pack(100, 0), 0),
    "more than the file has": (START + HEAD.pack(1 << 31, 0) + bytes(100), 0),
    "zeros": (sound()[: -len(END)] + bytes(5000), 2),
    "a wrong checksum": (sound()[: -len(END)] + frame(b"J{}", checksum=1), 2),
    "no end": (sound()[: -len(END)], 2),
}
"""Files that a killed process leaves, or a machine that loses its power; and how many of their steps are whole."""


def pair(folder: Path, make: Crafted, other: bytes | None = None) -> tuple[Path, Path]:
    """Two folders: a has what `make` makes, b a sound recording."""
    a, b = folder / "a", folder / "b"
    a.mkdir(parents=True)
    b.mkdir(parents=True)
    make(path_of(a, 0))
    path_of(b, 0).write_bytes(sound() if other is None else other)
    return a, b


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_recorder_writes_is_an_error(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = REFUSED[name]
    a, b = pair(tmp_path, make)
    for folders in ((a, b), (b, a)):
        with pytest.raises(RecordingError, match=message) as caught:
            compare(*folders)
        assert not CONTROL.search(str(caught.value))
        assert str(caught.value).startswith(str(a))
        assert "; expected " in str(caught.value)
        assert main(["compare", *map(str, folders)]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err == f"dash-guard compare: {caught.value}\n"


def test_there_are_many_kinds() -> None:
    assert len(REFUSED) > 70


LIMITED = """
import resource, signal, sys
from pathlib import Path
from dash_guard.cli import main
from dash_guard.recordings.file import path_of
from guard.tests.recordings.test_untrusted import REFUSED, pair

resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
for number, (make, _) in enumerate(REFUSED.values()):
    signal.alarm(120)  # none takes a second; the machine may have other work
    a, b = pair(Path(sys.argv[1]) / str(number), make)
    assert main(["compare", str(a), str(b)]) == 2, number
print("bounded")
"""


def test_crafted_files_take_no_memory_and_no_time(tmp_path: Path) -> None:
    """All of them within the address space that the modules of this test take, and 512 MiB."""
    imported = "import guard.tests.recordings.test_untrusted; print(open('/proc/self/statm').read().split()[0])"
    before = subprocess.run([sys.executable, "-c", imported], check=True, capture_output=True, text=True).stdout
    most = str(int(before) * resource.getpagesize() + (512 << 20))
    command = [sys.executable, "-c", LIMITED, str(tmp_path), most]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "bounded\n"), found.stderr
    assert "Traceback" not in found.stderr
    assert not CONTROL.search(found.stderr)


@pytest.mark.parametrize("name", CUT_OFF)
def test_a_process_that_was_killed_leaves_a_recording(name: str, tmp_path: Path) -> None:
    made, steps = CUT_OFF[name]
    result = compare(*pair(tmp_path, content(made)))
    assert (result.verdict, result.exit_code, result.steps) == ("not comparable", 2, steps)
    assert any(reason.startswith("a was cut off: rank 0") for reason in result.reasons)


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(sound())
    assert compare(*pair(tmp_path, lambda path: path.symlink_to(tmp_path / "elsewhere"))).verdict == "equal"


@contextmanager
def somebody() -> Iterator[None]:
    """As a user who may not read everything."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(mine)


def test_what_may_not_be_read_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair(tmp_path, content(sound()))
    for forbidden in (path_of(a, 0), b):
        mode = forbidden.stat().st_mode
        forbidden.chmod(0)
        with somebody(), pytest.raises(RecordingError, match="it cannot be read: Permission denied"):
            compare(a, b)
        with somebody():
            assert main(["compare", str(a), str(b)]) == 2
        forbidden.chmod(mode)
    assert "Traceback" not in capsys.readouterr().err


def test_folders_that_are_none(tmp_path: Path) -> None:
    a, _ = pair(tmp_path, content(sound()))
    os.mkfifo(tmp_path / "fifo")
    for folder in (tmp_path / "nothing", tmp_path / "fifo", path_of(a, 0), "/dev/null", "a\0b", "x" * 300):
        with pytest.raises((ArgumentError, RecordingError)):
            compare(a, folder)


def test_a_file_that_is_replaced_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f"
    names = many(2000)
    path.write_bytes(sound(0, 1, *names, steps=20))
    recording = Recording(path)
    found = recording.steps()
    next(found)
    (tmp_path / "other").write_bytes(path.read_bytes())
    (tmp_path / "other").rename(path)
    with pytest.raises(RecordingError, match="another file has taken its place"):
        list(found)


# ---------------------------------------------------------------------------------------------------- ranks


def run_of(folder: Path, world_size: int, *ranks: int, steps: int = 2, **names: tuple[str, str, str]) -> Path:
    """A recording of these ranks; `names` are of single ranks, as ``rank1=...``."""
    folder.mkdir()
    for rank in ranks:
        path_of(folder, rank).write_bytes(sound(rank, world_size, names.get(f"rank{rank}", NAME), steps=steps))
    return folder


@pytest.mark.parametrize(
    ("of_a", "of_b", "said"),
    [
        ((0, 2), (0, 2), ["a has no file of rank 1, of 3 ranks", "b has no file of rank 1, of 3 ranks"]),
        ((0, 1), (0, 1), ["a has no file of rank 2, of 3 ranks", "b has no file of rank 2, of 3 ranks"]),
        ((1, 2), (0, 1, 2), ["a has no file of rank 0, of 3 ranks"]),
        ((0, 1, 2), (1,), ["b has no file of ranks 0, 2, of 3 ranks"]),
    ],
)
def test_a_rank_without_a_file_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of_a: tuple[int, ...], of_b: tuple[int, ...], said: list[str]
) -> None:
    a, b = run_of(tmp_path / "a", 3, *of_a), run_of(tmp_path / "b", 3, *of_b)
    result = compare(a, b)
    assert (result.verdict, result.reasons, result.steps) == ("not comparable", said, 2)
    assert result.ranks == len({*of_a} & {*of_b})
    assert main(["compare", str(a), str(b)]) == 2
    assert said[0] in capsys.readouterr().out


def test_a_difference_is_found_with_a_missing_rank(tmp_path: Path) -> None:
    other = ("input", "Model", "float32 [3]")
    result = compare(run_of(tmp_path / "a", 3, 0, 1), run_of(tmp_path / "b", 3, 0, 1, rank1=other))
    assert (result.verdict, str(result.first)) == ("diverged", "step 1, rank 1: input Model")
    assert "a has no file of rank 2, of 3 ranks" in result.reasons
    assert result.conclusion.endswith(
        "Ranks without a file in both runs were not compared; the difference may have arisen there."
    )


def test_no_rank_in_common(tmp_path: Path) -> None:
    result = compare(run_of(tmp_path / "a", 2, 0), run_of(tmp_path / "b", 2, 1))
    assert result.verdict == "not comparable"
    assert "no rank has a file in both recordings" in result.reasons
    assert report.text(result)


def test_a_lie_about_the_number_of_ranks(tmp_path: Path) -> None:
    """A million ranks, of which one has a file: they are not listed one by one."""
    result = compare(run_of(tmp_path / "a", limits.RANKS, 0, 5), run_of(tmp_path / "b", limits.RANKS, 0, 5))
    assert result.verdict == "not comparable"
    assert result.reasons[0] == "a has no file of ranks 1 to 4, 6 to 1048575, of 1048576 ranks"
    sparse_ranks = run_of(tmp_path / "c", 200, *range(0, 200, 2))
    assert compare(sparse_ranks, sparse_ranks).reasons[0].endswith(" 35, 37, 39, ..., of 200 ranks")


def test_files_of_several_runs_in_one_folder(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", 2, 0, 1)
    path_of(a, 1).write_bytes(sound(1, 3))
    with pytest.raises(RecordingError, match=r"rank00001\.dash: a recording of a run of 3 ranks; expected one of 2"):
        compare(a, a)
    path_of(a, 1).unlink()
    path_of(a, 7).write_bytes(b"")
    with pytest.raises(RecordingError, match=r"rank00007\.dash: a file of rank 7; expected ranks 0 to 1"):
        compare(a, a)


def test_more_ranks_than_a_process_may_have_files_open(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", 100, *range(100))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    try:
        assert compare(a, a).verdict == "equal"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---------------------------------------------------------------------------------------------------- limits


def test_limits_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at its last allowed value, and one beyond."""
    a, b = pair(tmp_path, started(named(*many(5)), step(1, *range(5)), END), sound())
    monkeypatch.setattr("dash_guard.recordings.recording.NAMES", 5)
    compare(a, b)
    monkeypatch.setattr("dash_guard.recordings.recording.NAMES", 4)
    with pytest.raises(RecordingError, match="more than 4 names"):
        compare(a, b)
    monkeypatch.undo()
    size = max(path_of(folder, 0).stat().st_size for folder in (a, b))
    monkeypatch.setattr(frames, "FILE", size)
    compare(a, b)
    monkeypatch.setattr(frames, "FILE", size - 1)
    with pytest.raises(RecordingError, match=f"a file of {size} bytes"):
        compare(a, b)


def test_a_step_may_have_every_name_twice(tmp_path: Path) -> None:
    """Once from Python and once from CUDA graphs, in any order; each is compared with its like."""
    value = [bytes([n] * 16) for n in range(3)]

    def made(*entries: tuple[int, bytes]) -> bytes:
        return (
            START
            + named(NAME)
            + frame(b"S" + HEAD.pack(1, len(entries)) + b"".join(ENTRY.pack(*e) for e in entries))
            + END
        )

    both = made((0, value[0]), (0, value[1]))
    assert compare(*pair(tmp_path / "equal", content(both), both)).verdict == "equal"
    result = compare(*pair(tmp_path / "differ", content(both), made((0, value[0]), (0, value[2]))))
    assert (result.verdict, result.others_count) == ("diverged", 0)
    assert result.first is not None
    assert result.first.before == "input Model"


def test_findings_are_listed_up_to_a_limit(tmp_path: Path) -> None:
    """Replicas that differ do so in every step from then on, and every rank says so."""
    path = path_of(tmp_path / "a", 0)
    for folder, count in ((tmp_path / "a", 3 * limits.FINDINGS), (tmp_path / "b", limits.FINDINGS)):
        folder.mkdir()
        for rank in (0, 1):
            found = objects(*({**FINDING, "step": n + 1} for n in range(count)))
            start = MAGIC + objects(environment(rank, 2)) + named(NAME)
            path_of(folder, rank).write_bytes(start + step(1, 0) + found + END)
    recording = Recording(path)
    list(recording.steps())
    assert (len(recording.findings), recording.findings_count) == (limits.FINDINGS, 3 * limits.FINDINGS)
    result = compare(tmp_path / "a", tmp_path / "b")
    assert [run for run, _ in result.findings].count("a") == limits.FINDINGS
    assert [run for run, _ in result.findings].count("b") == limits.FINDINGS
    assert "a has more findings than the 100 that are listed" in result.reasons
    assert not any(reason.startswith("b has more") for reason in result.reasons)


def test_a_recorder_writes_nothing_that_is_not_read(tmp_path: Path) -> None:
    file = Appender(tmp_path / "f")
    for bad in (environment(rank=5), {"type": "names", "names": [("input", "x" * 5000, "")]}, {"type": "other"}):
        with pytest.raises(RecordingError, match="not written"):
            file.json(bad)
    with pytest.raises(RecordingError, match="not written: a frame of"):
        file.step(1, [(0, bytes(16))] * (1 + limits.FRAME // ENTRY.size))
    file.json(environment())
    longest = [Name("input", f"{n:04}" + "\U0001f600" * (limits.TEXT - 4), "," * limits.TEXT) for n in range(250)]
    StepWriter()._name(file, longest)
    file.json({"type": "end"})
    recording = Recording(tmp_path / "f")
    list(recording.steps())
    assert recording.ended
    assert recording._names == longest


# ---------------------------------------------------------------------------------------------------- what is shown


def evil(folder: Path) -> Comparison:
    """A comparison in which everything that can be text is hostile."""
    facts: dict[str, Any] = {"gpu": {EVIL: EVIL, "name": EVIL}, "versions": {"torch": EVIL}}
    before, name = ("initial parameter", EVIL, EVIL), ("input", EVIL, EVIL)
    unseen = objects({"type": "unseen", "name": EVIL, "reason": EVIL}, {**FINDING, "tensor": EVIL})
    told = objects({"type": "facts", "numerics_keys": [EVIL]})
    start = MAGIC + objects(environment(0, 2, **facts)) + told + named(before, name) + unseen
    other = frame(b"S" + HEAD.pack(1, 2) + ENTRY.pack(0, bytes(16)) + ENTRY.pack(1, b"x" * 16))
    a, b = folder / f"a{EVIL[:12]}", folder / "b"
    for at, made in ((a, start + step(1, 0, 1)), (b, MAGIC + objects(environment(0, 2)) + named(before, name) + other)):
        at.mkdir(parents=True)
        path_of(at, 0).write_bytes(made + END)
    return compare(a, b)


def test_control_characters_are_escaped_wherever_they_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evil(tmp_path)
    assert result.first is not None
    assert result.first.tensor == EVIL
    for shown in (report.text(result), page.html(result)):
        assert not CONTROL.search(shown)
        assert r"w\x1b[2J\x07\x7f\x9b31m\u202eabc\u2066\u2028\ud800\r\n" in shown
        shown.encode("utf-8")
    assert "<b>" not in page.html(result)
    xml = junit.xml(result, "compare", EVIL)
    assert not CONTROL.search(xml.replace("\n", ""))
    assert ElementTree.fromstring(xml)[0][0].text == report.text(result)
    assert main(["compare", "--html", str(tmp_path / "page.html"), result.a, result.b]) == 1
    assert not CONTROL.search(capsys.readouterr().out)
    assert main(["compare", "--json", result.a, result.b]) == 1
    shown = capsys.readouterr().out
    assert not CONTROL.search(shown)
    assert json.loads(shown)["first"]["tensor"] == EVIL


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_of_any_encoding_is_written_to(encoding: str, tmp_path: Path) -> None:
    a, b = pair(tmp_path, content(sound(0, 1, ("input", "ä→" + EVIL, ""))), sound(0, 1, ("input", "ä→", "")))
    command = [sys.executable, "-m", "dash_guard", "compare", str(a), str(b)]
    found = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, check=False)
    assert (found.returncode, found.stderr) == (2, b"")
    assert not CONTROL.search(found.stdout.decode(encoding))


@given(st.text())
def test_printable_text_is_one_line_without_anything_hidden(text: str) -> None:
    shown = _untrusted.printable(text)
    assert shown.isprintable()
    assert _untrusted.printable(shown) == shown
    assert not CONTROL.search(_untrusted.printable_lines(text))
    if text.isprintable():
        assert shown == text


# ---------------------------------------------------------------------------------------------------- exit statuses


def command(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    found = [sys.executable, "-m", "dash_guard", "compare", *map(str, words)]
    return subprocess.run(found, text=True, check=False, **{"capture_output": True, **options})


def test_one_is_the_status_of_diverged_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair(tmp_path, content(sound()))
    other = run_of(tmp_path / "other", 1, 0, rank0=("input", "Model", "int8 []"))
    assert main(["compare", str(a), str(b)]) == 0
    assert main(["compare", str(a), str(other)]) == 1
    assert main(["compare", str(a), str(tmp_path / "nothing")]) == 2
    assert main(["compare", "--html", str(tmp_path), str(a), str(other)]) == 2  # a directory
    assert "expected a file that can be written" in capsys.readouterr().err
    full = Path("/dev/full")
    if full.exists():
        with full.open("w") as output:
            found = command(a, other, capture_output=False, stdout=output, stderr=subprocess.PIPE)
        assert (found.returncode, found.stderr.count("\n")) == (2, 1), found.stderr
    reader, writer = os.pipe()
    os.close(reader)
    found = command(a, other, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (found.returncode, found.stderr) == (2, "")


def test_a_defect_has_a_traceback_and_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*folders: object) -> None:
        raise AssertionError(EVIL)

    monkeypatch.setattr("dash_guard.recordings.compare.compare", fail)
    assert main(["compare", "a", "b"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert not CONTROL.search(shown)


def test_too_little_memory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise MemoryError

    a, b = pair(tmp_path, content(sound()))
    monkeypatch.setattr(schema, "parse_json", fail)
    with pytest.raises(RecordingError, match="do not fit into memory"):
        compare(a, b)


# ---------------------------------------------------------------------------------------------------- properties


@functools.cache
def base() -> bytes:
    """A file of everything that a recorder writes."""
    names = [NAME, ("gradient", "ä.weight", "float32 [2, 3]"), ("parameter", "w", "bfloat16 []")]
    parts = [
        MAGIC,
        objects(environment(0, 2, gpu={"name": "H100", "memory": 85 << 30}, settings={"x": True, "y": None})),
        objects({"type": "facts", "numerics_keys": ["k1"]}),
        named(*names[:2]),
        objects({"type": "state", "step": 1, "values": {"generator of device 0": "philox 1 4", "loss scale": 2.5}}),
        objects({"type": "loss", "step": 1, "value": 2.5}, {"type": "loss", "step": 1, "value": -1}),
        step(1, 0),
        step(1, 1),
        objects({"type": "unseen", "name": "gradient v", "reason": "it is sparse"}, FINDING),
        named(names[2]),
        objects({"type": "loss", "step": 2, "value": "inf"}),
        step(2, 0, 1, 2),
        step(3, 2, 1, 0),
        END,
    ]
    return b"".join(parts)


def cut(made: bytes) -> list[bytes]:
    """The magic and the frames of a file."""
    parts, place = [made[: len(MAGIC)]], len(MAGIC)
    while place < len(made):
        length, _ = HEAD.unpack_from(made, place)
        parts.append(made[place : place + HEAD.size + length])
        place += HEAD.size + length
    return parts


@st.composite
def truncated(draw: st.DrawFn) -> bytes:
    return base()[: draw(st.integers(0, len(base())))] + draw(st.binary(max_size=20))


@st.composite
def flipped(draw: st.DrawFn) -> bytes:
    """Bits flipped, with checksums that hide it or without."""
    made = bytearray(base())
    for bit in draw(st.lists(st.integers(0, 8 * len(made) - 1), min_size=1, max_size=8)):
        made[bit // 8] ^= 1 << bit % 8
    return bytes(made)


@st.composite
def flipped_inside(draw: st.DrawFn) -> bytes:
    """Bits of one frame flipped, under a checksum that agrees."""
    parts = cut(base())
    place = draw(st.integers(1, len(parts) - 1))
    inside = bytearray(parts[place][HEAD.size :])
    for bit in draw(st.lists(st.integers(0, 8 * len(inside) - 1), min_size=1, max_size=8)):
        inside[bit // 8] ^= 1 << bit % 8
    parts[place] = frame(bytes(inside))
    return b"".join(parts)


@st.composite
def spliced(draw: st.DrawFn) -> bytes:
    """Frames left out, repeated and in another order."""
    parts = cut(base())
    places = draw(st.lists(st.integers(0, len(parts) - 1), max_size=20))
    kept = draw(st.integers(0, 4))
    return b"".join([*parts[:kept], *(parts[place] for place in places)])


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def crafted(draw: st.DrawFn) -> bytes:
    """A frame of which one field, at any depth, has another value; or one with arbitrary content."""
    parts = cut(base())
    place = draw(st.integers(1, len(parts) - 1))
    inside = parts[place][HEAD.size :]
    if inside[:1] == b"J" and draw(st.booleans()):
        found = json.loads(inside[1:])
        field = draw(st.sampled_from(sorted(found)))
        if isinstance(found[field], list) and found[field] and draw(st.booleans()):
            found[field][draw(st.integers(0, len(found[field]) - 1))] = draw(_values)
        else:
            found[field] = draw(_values)
        inside = b"J" + json.dumps(found).encode()
    elif draw(st.booleans()):
        number, count = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 5))
        numbers = draw(st.lists(st.integers(0, 4), max_size=5))
        inside = step(number, *numbers, count=count)[HEAD.size :]
    else:
        inside = draw(st.binary(max_size=40)) or b"?"
    parts[place] = frame(inside)
    return b"".join(parts)


def outcome(a: Path, b: Path) -> Comparison | RecordingError:
    try:
        return compare(a, b)
    except RecordingError as error:
        return error


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=st.one_of(truncated(), flipped(), flipped_inside(), spliced(), crafted(), st.binary(max_size=200)))
def test_there_is_an_outcome_or_a_recording_error(made: bytes, tmp_path: Path) -> None:
    """Whatever the bytes, on either side, beside a sound file; and what is shown can be shown."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir(exist_ok=True)
    path_of(tmp_path / "a", 0).write_bytes(made)
    path_of(tmp_path / "b", 0).write_bytes(base())
    for left, right in (("a", "b"), ("b", "a"), ("a", "a")):
        result = outcome(tmp_path / left, tmp_path / right)
        if isinstance(result, RecordingError):
            assert not CONTROL.search(str(result))
            continue
        assert result.exit_code in (1, 2)  # rank 1 has no file, so that nothing is equal
        of_both = (losses(tmp_path / folder) for folder in (left, right))
        for shown in (report.text(result), page.html(result, sections(*of_both, first=1))):
            assert not CONTROL.search(shown)
            shown.encode("utf-8")
        json.loads(json.dumps(result.to_dict(), allow_nan=False))
        if made == base() or left == right:
            assert result.exit_code == 2
