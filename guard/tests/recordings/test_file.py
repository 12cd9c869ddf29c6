"""The file of a rank: whatever ends the process, what was written before is read."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dash_guard.errors import RecordingError
from dash_guard.recordings.compare import compare
from dash_guard.recordings.file import MAGIC, READ, Appender, Entry, Name, path_of
from dash_guard.recordings.recording import Recording
from dash_guard.recordings.run import Run
from dash_guard.recordings.writer import File, Writer
from dash_inductor.errors import ArgumentError
from dash_inductor.observers import phases

from ..support.recordings import environment, sound

NAMES = [Name("gradient", "a.weight", "float32 [2]"), Name("parameter", "ä", "bfloat16 []")]


def write(path: Path, steps: int) -> list[int]:
    """A small recording; the ends of its frames."""
    appender, ends = Appender(path), []
    appender.json(environment())
    ends.append(path.stat().st_size)
    appender.json({"type": "names", "names": NAMES})
    ends.append(path.stat().st_size)
    for step in range(1, steps + 1):
        appender.step(step, [(0, bytes([step] * 16))])
        ends.append(path.stat().st_size)
        appender.step(step, [(1, bytes([step + 100] * 16))])
        ends.append(path.stat().st_size)
    appender.json({"type": "end"})
    appender.close()
    return ends


def read(path: Path) -> tuple[Recording, list[tuple[int, list[Entry]]]]:
    recording = Recording(path)
    return recording, list(recording.steps())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "f", 3)
    recording, steps = read(tmp_path / "f")
    assert [step for step, _ in steps] == [1, 2, 3]
    assert steps[1][1] == [Entry(NAMES[0], bytes([2] * 16)), Entry(NAMES[1], bytes([102] * 16))]
    assert (recording.ended, recording.torn, recording.facts) == (
        True, None, {"rank": 0, "world_size": 1, "every": 1},
    )  # fmt: skip


def test_a_file_cut_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    ends = write(tmp_path / "f", 3)
    whole = (tmp_path / "f").read_bytes()
    cut = tmp_path / "cut"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        recording, steps = read(cut)
        frames = sum(end <= size for end in ends)
        fingerprints = [entry.fingerprint for _, entries in steps for entry in entries]
        assert len(fingerprints) == max(0, frames - 2)
        assert not recording.ended
        at_end = size in (len(MAGIC), *ends)
        assert recording.torn == (None if at_end else max((e for e in (0, len(MAGIC), *ends) if e <= size), default=0))


def test_a_damaged_byte_ends_the_recording_there(tmp_path: Path) -> None:
    ends = write(tmp_path / "f", 2)
    whole = bytearray((tmp_path / "f").read_bytes())
    for place in range(len(MAGIC), len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        (tmp_path / "damaged").write_bytes(damaged)
        recording, steps = read(tmp_path / "damaged")
        before = max(end for end in (len(MAGIC), *ends) if end <= place)
        assert recording.torn == before, place
        assert sum(len(entries) for _, entries in steps) == max(0, sum(end <= place for end in ends) - 2)


def test_other_files_are_no_recordings(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"something else")
    with pytest.raises(RecordingError, match="no recording that this version"):
        read(tmp_path / "f")
    with pytest.raises(ArgumentError, match=r"rank00000\.dash"):
        Run(tmp_path)


def test_state_is_carried_from_step_to_step(tmp_path: Path) -> None:
    """Only what has changed is written; a step that is skipped changes nothing."""
    file = Appender(path_of(tmp_path, 0))
    file.json(environment())
    file.json({"type": "names", "names": [NAMES[0]]})
    for step, values in ((1, {"lr": 0.5, "x": None}), (2, {}), (4, {"lr": 1, "loss scale": 2.0})):
        if values:
            file.json({"type": "state", "step": step, "values": values})
        file.step(step, [(0, bytes(16))])
    file.close()
    _, steps = read(path_of(tmp_path, 0))
    states = [{e.name.tensor: e.value for e in entries if e.name.phase == phases.STATE} for _, entries in steps]
    assert states == [{"lr": 0.5, "x": None}, {"lr": 0.5, "x": None}, {"lr": 1, "x": None, "loss scale": 2.0}]
    assert [len(entries) for _, entries in steps] == [3, 3, 4]


@pytest.mark.parametrize("version", READ[1:])
def test_recordings_of_versions_before_are_read(version: bytes, tmp_path: Path) -> None:
    old = tmp_path / "old"
    for folder, magic in ((old, version), (tmp_path / "new", MAGIC)):
        folder.mkdir()
        path_of(folder, 0).write_bytes(sound().replace(MAGIC, magic))
    assert compare(old, tmp_path / "new").verdict == "equal"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = path_of(tmp_path / "new", 3)
    Appender(path).close()
    with pytest.raises(FileExistsError):
        Appender(path)
    assert list(Run(tmp_path / "new").recordings) == [3]


ENDLESS = """
import sys
from pathlib import Path
from dash_guard.recordings.file import Name
from dash_guard.recordings.writer import File, Writer

writer = Writer(Path(sys.argv[1]), 0, {"rank": 0, "world_size": 1, "every": 1})
names = [Name("gradient", str(n), "int8 []") for n in range(500)]
writer.put(lambda file: file.json({"type": "names", "names": names}))
for step in range(1, 10**9):
    writer.put(lambda file, step=step: file.step(step, [(n, step.to_bytes(16, "little")) for n in range(500)]))
    if step == 20:
        writer.put(lambda file: print("running", flush=True))  # on the thread that has written these steps
"""


def test_a_killed_process_leaves_whole_steps(tmp_path: Path) -> None:
    """Killed at random moments, in the middle of writing as fast as it can."""
    kills = 4
    paths = [tmp_path / str(number) for number in range(kills)]
    for number, path in enumerate(paths):
        process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        threading.Event().wait(random.Random(number).random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        recording, steps = read(path_of(path, 0))
        assert not recording.ended
        assert [step for step, _ in steps] == list(range(1, len(steps) + 1))
        assert len(steps) >= 20
        for step, entries in steps:
            assert [entry.name.tensor for entry in entries] == [str(n) for n in range(500)]
            assert {entry.fingerprint for entry in entries} == {step.to_bytes(16, "little")}


def test_what_goes_wrong_in_the_thread_ends_the_file_and_not_the_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(file: File) -> None:
        raise OSError("no space left")

    done = list[str]()
    writer = Writer(tmp_path, 0, environment())
    writer.put(lambda file: file.step(1, []))
    writer.put(fail)
    writer.put(lambda file: file.step(2, []))
    writer.put(lambda file: done.append("compared"))  # what other ranks wait for goes on
    writer.close()
    recording, steps = read(path_of(tmp_path, 0))
    assert [step for step, _ in steps] == [1]
    assert not recording.ended
    assert done == ["compared"]
    assert [record.message for record in caplog.records] == [
        "the recording of rank 0 ends here, and training goes on: no space left"
    ]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer(tmp_path, 0, environment())
    assert isinstance(writer._file, Appender)
    os.dup2(os.open("/dev/full", os.O_WRONLY), writer._file._file)
    writer.put(lambda file: file.step(1, []))
    writer.close()
    assert "No space left" in caplog.text


def test_a_folder_that_cannot_be_made_ends_the_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "f").touch()
    writer = Writer(tmp_path / "f", 0, environment())
    writer.put(lambda file: file.step(1, []))
    writer.close()
    assert "training goes on" in caplog.text


def segment(folder: Path, number: int, steps: range, ended: bool = True, value: int = 0) -> None:
    appender = Appender(path_of(folder, 0, number))
    appender.json(environment())
    appender.json({"type": "names", "names": NAMES[:1]})
    for step in steps:
        appender.step(step, [(0, bytes([step + value] * 16))])
    if ended:
        appender.json({"type": "end"})
    appender.close()


def test_a_restarted_process_goes_on_in_a_segment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Killed after step 7, resumed from the checkpoint of step 4: what it did again counts."""
    segment(tmp_path, 0, range(1, 8), ended=False, value=100)
    writer = Writer(tmp_path, 0, environment())
    writer.put(lambda file: file.json({"type": "names", "names": NAMES[:1]}))
    for step in range(5, 10):
        writer.put(lambda file, step=step: file.step(step, [(0, bytes([step] * 16))]))  # type: ignore[misc]
    writer.close()
    assert "this one is rank00000.1.dash" in caplog.text
    run = Run(tmp_path).recordings[0]
    found = {step: entries[0].fingerprint[0] for step, entries in run.steps()}
    assert found == {1: 101, 2: 102, 3: 103, 4: 104, 5: 5, 6: 6, 7: 7, 8: 8, 9: 9}
    assert (run.ended, run.torn) == (True, None)
    segment(tmp_path, 2, range(0), ended=False)  # started again, and did nothing
    assert [step for step, _ in Run(tmp_path).recordings[0].steps()] == list(range(1, 10))
    for name in ("rank00000.0.dash", "rank00000.01.dash", "rank00000.1000.dash", "rank00000.x.dash"):
        (tmp_path / name).touch()
        with pytest.raises(RecordingError, match="no name of the file of a rank"):
            Run(tmp_path)
        (tmp_path / name).unlink()
