"""Reads the recordings of all ranks of a run.

A file ends when its process ends, in whatever way.  Everything before a torn or damaged frame is read; nothing after it
is guessed at.  A frame that is whole but is not what a recorder writes is an error.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from dash_inductor.errors import ArgumentError

from ..errors import RecordingError
from .file import path_of
from .limits import RANKS, SEGMENTS
from .segments import Segments


class Run:
    """The files of all ranks in a folder, each of them read as far as `Recording.begin` does.

    Args:
        folder: the folder.

    Attributes:
        recordings: the files of each rank, by rank in ascending order.
        world_size: how many ranks the run had; None if no file is long enough to say so.

    Raises:
        ArgumentError: the folder has no recording.
        RecordingError: a file has a name that is not of a rank, is of another rank or of another run, or is refused by
            `Recording.begin`.
    """

    def __init__(self, folder: Path) -> None:
        self.recordings = {rank: Segments(paths) for rank, paths in _files_in(folder).items()}
        self.world_size: int | None = None
        for rank, recording in self.recordings.items():
            recording.begin()
            if recording.facts:
                self._agree(rank, recording)
        last = max(self.recordings)
        if self.world_size is not None and last >= self.world_size:
            raise RecordingError(path_of(folder, last), f"a file of rank {last}", f"ranks 0 to {self.world_size - 1}")

    def _agree(self, rank: int, recording: Segments) -> None:
        facts = recording.facts
        if facts["rank"] != rank:
            raise RecordingError(recording.path, f"a recording of rank {facts['rank']}", f"one of rank {rank}")
        if self.world_size not in (None, facts["world_size"]):
            raise RecordingError(
                recording.path,
                f"a recording of a run of {facts['world_size']} ranks",
                f"one of {self.world_size} ranks, as the files before it are",
            )
        self.world_size = facts["world_size"]

    def missing(self) -> list[range]:
        """The ranks that have no file, as ranges; if the number of ranks is unknown, those below the last one found."""
        bounds = [-1, *self.recordings, self.world_size or 0]
        gaps = (range(before + 1, after) for before, after in itertools.pairwise(bounds))
        return [gap for gap in gaps if gap]


def _files_in(folder: Path) -> dict[int, list[Path]]:
    """The files that ranks have left in a folder, by rank and in the order of their segments."""
    found: dict[int, dict[int, Path]] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if re.fullmatch(r"rank.*\.dash", entry.name, re.DOTALL):
                    rank, segment = _rank_of(folder, entry.name)
                    found.setdefault(rank, {})[segment] = folder / entry.name
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null character
        pass  # as if it were empty
    except OSError as error:
        raise RecordingError(folder, f"it cannot be read: {error.strerror}", "a folder with a recording") from error
    if not found:
        raise ArgumentError("folder", str(folder), "a folder with a recording, which has a file rank00000.dash")
    return {rank: [path for _, path in sorted(found[rank].items())] for rank in sorted(found)}


def _rank_of(folder: Path, name: str) -> tuple[int, int]:
    digits = re.fullmatch(r"rank([0-9]{5,7})(?:\.([1-9][0-9]{0,3}))?\.dash", name)
    rank, segment = (int(digits[1]), int(digits[2] or 0)) if digits else (RANKS, 0)
    if rank >= RANKS or segment >= SEGMENTS or path_of(folder, rank, segment).name != name:
        last = path_of(folder, RANKS - 1).name
        raise RecordingError(
            folder / name, "no name of the file of a rank", f"rank00000.dash to {last}, or other names"
        )
    return rank, segment
