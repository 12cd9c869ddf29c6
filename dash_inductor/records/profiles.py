"""Measured timelines: when the Hopper backward computed and added the contribution of each tile pair.

With ``config.profile`` (DASH_INDUCTOR_PROFILE=1) the kernel records timestamps for every step of the first `CALLS`
calls of each site, see Note [Stamps] in `kernels/hopper/backward/device/stamps.py`.  The host does not wait for the GPU
until the times are read:

    profile_runs()          the calls that were recorded
    write_profiles(folder)  writes a JSON file for each; calls not written before the process ends are written then
    clear_profile_runs()    discards them, and counts calls from 0 again

Calls captured in a CUDA graph are not recorded, because each replay would overwrite the times of the previous one.
With ``mode="reduce-overhead"`` the calls before the capture are recorded.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import arguments as _arguments

CALLS = 3
"""The number of calls recorded per site: the first one runs with cold caches, the others show how times vary."""

BYTES_OF_A_CALL, BYTES_OF_ALL = 32 << 20, 256 << 20
"""The limits in bytes for the times of one call and of all calls; the times are on the GPU during the call, then on the
host."""

_BYTES_OF_A_PAIR = 32

log = logging.getLogger("dash_inductor")


class ProfileRun:
    """The recording of one call of the Hopper backward.

    Attributes:
        site: the site's name; "" for a call of the operator outside of a compiled graph.
        number: the number of this call among the recorded calls with the same name, from 1.
        meta: facts about the call: ``kernel``, ``plan``, ``spec``, ``gpu``, ``sms``, ``shape`` and others.
        heads: the number of query heads (over all batch elements) whose times fit into `BYTES_OF_A_CALL`.
        written: whether the call has been written to a file.
    """

    def __init__(self, site: str, number: int, meta: Mapping[str, Any], table: Tensor) -> None:
        self.site, self.number, self.meta, self.heads = site, number, dict(meta), table.shape[0]
        self.written = False
        self._table, self._device = table, table.device

    @property
    def table(self) -> Tensor:
        """The recorded timestamps, int64 [heads, n_kv, 1 + n_q, 4], see Note [Stamps].

        The tensor is on the call's device until `end`, then on the CPU.
        """
        return self._table

    @property
    def bytes(self) -> int:
        return self._table.numel() * self._table.element_size()

    def end(self) -> None:
        """Ends the recording: enqueues a copy of the timestamps to the host on the current stream, without waiting."""
        self._table = self._table.to("cpu", non_blocking=True)

    def to_dict(self) -> dict[str, Any]:
        """Synchronizes the device and returns the times as plain data for JSON.

        Returns:
            ``{"unit": "ns", "spans": [...], "meta": {...}}``.  A span is one tile pair: ``sm``, ``work_id`` (the
            position of its tile schedule in launch order), ``head`` (query head, counted over all batch elements),
            ``kv`` and ``q`` (tile indices), and four times since the earliest start: the pair is computed from
            ``start``, its dq tile waits for its semaphore from ``wait`` and is added from ``added``, and at ``end`` the
            next one may add. Spans are sorted by start. ``meta`` is the attribute `meta` plus ``site``, ``number``,
            ``heads`` and ``tick``, the resolution of the GPU's clock in nanoseconds: all times are multiples of it.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        table = self._table.cpu().numpy()
        head, kv, q = np.nonzero(table[:, :, 1:, 3])
        times, begun = table[head, kv, 1 + q], table[head, kv, 0]
        # The timestamp warp may notice the end of a phase after the reducer warp has begun the next: clip such times.
        times = np.minimum.accumulate(times[:, ::-1], axis=1)[:, ::-1]
        times = times - times.min(initial=np.iinfo(np.int64).max)
        order = np.argsort(times[:, 0], kind="stable")
        columns = [begun[:, 1], begun[:, 0], head, kv, q, *times.T]
        names = ("sm", "work_id", "head", "kv", "q", "start", "wait", "added", "end")
        rows = np.stack(columns, axis=1)[order].tolist()
        tick = int(np.gcd.reduce(times, axis=None))
        meta = {"site": self.site, "number": self.number, "heads": self.heads, "tick": tick, **self.meta}
        return {"unit": "ns", "spans": [dict(zip(names, row, strict=True)) for row in rows], "meta": meta}


_lock = threading.Lock()  # backwards may run on several threads
_runs: list[ProfileRun] = []
_calls: Counter[Any] = Counter()
_names: Counter[str] = Counter()


def begin(
    site: str, key: object, heads: int, kv_tiles: int, q_tiles: int, device: torch.device, meta: Mapping[str, Any]
) -> ProfileRun | None:
    """Starts to record a call: the kernel then fills `ProfileRun.table`, and the caller calls `ProfileRun.end`.

    Args:
        site: the site's name; "" outside of a compiled graph.
        key: a key that distinguishes sites with the same name.
        heads: the number of query heads over all batch elements.
        kv_tiles, q_tiles: the numbers of tiles per head.
        device: the device of the call.
        meta: facts about the call, for `ProfileRun.meta`.

    Returns:
        The run; None if this call is not recorded.  A warning is logged if the cause is a CUDA graph or lack of memory.
    """
    if torch.cuda.is_current_stream_capturing():
        warn("calls that a CUDA graph records are not profiled, and neither are its replays")
        return None
    room = min(heads, BYTES_OF_A_CALL // (_BYTES_OF_A_PAIR * kv_tiles * (1 + q_tiles)))
    if room == 0:
        warn(f"{site}: not profiled: the {kv_tiles} x {q_tiles} tile pairs of a head are too many")
        return None
    with _lock:
        if _calls[site, key] == CALLS:
            return None
        if sum(run.bytes for run in _runs) + room * _BYTES_OF_A_PAIR * kv_tiles * (1 + q_tiles) > BYTES_OF_ALL:
            warn(f"from {site} on nothing is profiled: {BYTES_OF_ALL >> 20} MiB of times have been recorded")
            return None
        _announce()
        _calls[site, key] += 1
        _names[site] += 1
        table = torch.zeros((room, kv_tiles, 1 + q_tiles, 4), dtype=torch.int64, device=device)
        run = ProfileRun(site, _names[site], {**meta, "heads_of_call": heads}, table)
        _runs.append(run)
    return run


def profile_runs() -> tuple[ProfileRun, ...]:
    """The calls recorded since the last `clear_profile_runs`, oldest first."""
    with _lock:
        return tuple(_runs)


def clear_profile_runs() -> None:
    """Discards all recorded calls, written or not; the next `CALLS` calls of every site are recorded again."""
    with _lock:
        _runs.clear()
        _calls.clear()
        _names.clear()


def write_profiles(folder: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """Writes each recorded call to a file ``SITE-NUMBER.json``, in the format of `ProfileRun.to_dict`.

    Args:
        folder: the folder, created if necessary; by default ``dash_inductor_profile/rankR`` if the environment variable
            RANK is set, else ``dash_inductor_profile/pidP``.

    Returns:
        The files, in the order of `profile_runs`.

    Raises:
        ArgumentError: `folder` is not a path.
        OSError: a file cannot be written.
    """
    where = _default_folder() if folder is None else _arguments.path("folder", folder)
    return tuple(_write(run, where) for run in profile_runs())


def _write(run: ProfileRun, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', run.site) or 'call'}-{run.number}.json"
    path.write_text(json.dumps(run.to_dict(), separators=(",", ":")) + "\n", encoding="utf-8")
    run.written = True
    return path


def _default_folder() -> Path:
    rank = os.environ.get("RANK", "")
    return Path("dash_inductor_profile", f"rank{rank}" if rank.isdecimal() else f"pid{os.getpid()}")


@functools.cache
def _announce() -> None:
    atexit.register(_write_the_rest)
    log.warning(
        "the first %s calls of every attention backward are profiled, and written to %s when the process ends",
        CALLS, _default_folder(),
    )  # fmt: skip


def _write_the_rest() -> None:
    """Writes the calls that have not been written yet; runs when the process ends."""
    rest = [run for run in profile_runs() if not run.written]
    for run in rest:
        _write(run, _default_folder())
    if rest:
        log.warning("the profiles of %s calls were written to %s", len(rest), _default_folder().absolute())


@functools.cache
def warn(text: str) -> None:
    """Logs a warning, each text at most once per process."""
    log.warning("%s", text)
