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

from dash_inductor.errors import ArgumentError, RecordingError
from dash_inductor.observers.recordings.file import MAGIC, Appender, Entry, Name, path_of
from dash_inductor.observers.recordings.recording import Recording, Run
from dash_inductor.observers.recordings.writer import Writer

from ...support.recordings import environment

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
    with pytest.raises(RecordingError, match="no recording of this version"):
        read(tmp_path / "f")
    with pytest.raises(ArgumentError, match=r"rank00000\.dash"):
        Run(tmp_path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = path_of(tmp_path / "new", 3)
    Appender(path).close()
    with pytest.raises(RecordingError, match="exists already"):
        Appender(path)
    assert list(Run(tmp_path / "new").recordings) == [3]


ENDLESS = """
import sys
from pathlib import Path
from dash_inductor.observers.recordings.file import Name
from dash_inductor.observers.recordings.writer import Writer

writer = Writer(Path(sys.argv[1]), {"rank": 0, "world_size": 1, "every": 1})
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
        recording, steps = read(path)
        assert not recording.ended
        assert [step for step, _ in steps] == list(range(1, len(steps) + 1))
        assert len(steps) >= 20
        for step, entries in steps:
            assert [entry.name.tensor for entry in entries] == [str(n) for n in range(500)]
            assert {entry.fingerprint for entry in entries} == {step.to_bytes(16, "little")}


def test_what_goes_wrong_in_the_thread_reaches_the_program(tmp_path: Path) -> None:
    def fail(file: Appender) -> None:
        raise OSError("no space left")

    writer = Writer(tmp_path / "f", environment())
    writer.put(lambda file: file.step(1, []))
    writer.put(fail)
    writer.put(lambda file: file.step(2, [])) if writer._jobs.qsize() else None
    with pytest.raises(OSError, match="no space left"):
        writer.close()
    recording, steps = read(tmp_path / "f")
    assert [step for step, _ in steps] == [1]
    assert not recording.ended


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "f", environment())
    os.dup2(os.open("/dev/full", os.O_WRONLY), writer._appender._file)
    writer.put(lambda file: file.step(1, []))
    with pytest.raises(OSError, match="No space left"):
        writer.close()
