"""Real timelines: when the Hopper backward computed and added the contribution of each tile pair.

With ``config.profile`` (DASH_INDUCTOR_PROFILE=1) the kernel stamps the steps of the first `CALLS` calls of every site,
see Note [Stamps] in `kernels/hopper/backward/device/stamps.py`.  Nothing waits for the GPU until somebody looks:

    profile_runs()          the calls that were recorded
    write_profiles(folder)  a JSON file for each; whatever was not written by the end of the process is written then
    clear_profile_runs()    forget them, and count calls anew

Calls that a CUDA graph records, and its replays, are not stamped: every replay would overwrite the times of the one
before.  With ``mode="reduce-overhead"`` the calls before the capture are.
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
"""How many calls of a site are recorded: the first one finds cold caches, the others tell how times vary."""

BYTES_OF_A_CALL, BYTES_OF_ALL = 32 << 20, 256 << 20
"""The bytes for the times of a call, and of all calls together: first on the GPU during the call, then on the host."""

_BYTES_OF_A_PAIR = 32

log = logging.getLogger("dash_inductor")


class ProfileRun:
    """One recorded call.

    Attributes:
        site: the site's name, "" for a call of the operator outside of a compiled graph.
        number: the number of the recorded call among those with this name, from 1.
        meta: what is known of the call: ``kernel``, ``plan``, ``call``, ``gpu``, ``sms``, ``shape`` and others.
        heads: of how many query heads, of all batch elements, the times were recorded: as many as there was room for.
    """

    def __init__(self, site: str, number: int, meta: Mapping[str, Any], table: Tensor) -> None:
        self.site, self.number, self.meta, self.heads = site, number, dict(meta), table.shape[0]
        self.written = False
        self._table, self._device = table, table.device

    @property
    def table(self) -> Tensor:
        """int64 [heads, n_kv, 1 + n_q, 4], on the device of the call until `end`, see Note [Stamps]."""
        return self._table

    @property
    def bytes(self) -> int:
        return self._table.numel() * self._table.element_size()

    def end(self) -> None:
        """Have the times copied to the host once the GPU has come to this point of its stream."""
        self._table = self._table.to("cpu", non_blocking=True)

    def to_dict(self) -> dict[str, Any]:
        """The times, once the GPU has done all its work.

        Returns:
            ``{"unit": "ns", "spans": [...], "meta": {...}}``.  A span is one tile pair: ``sm``, ``ticket`` (the place
            of its walk in the order of launch), ``head`` (query heads, counted through all batch elements), ``kv`` and
            ``q`` (tiles), and the times since the first start: from ``start`` the pair is computed, from ``wait`` its
            dq tile waits for its turn, from ``added`` it is added, and at ``end`` the next one may add.  They are
            sorted by start.
            ``meta`` has ``site``, ``number``, ``heads`` and ``tick`` beside what `meta` has: all times are multiples of
            ``tick`` nanoseconds, the resolution of the GPU's clock.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        table = self._table.cpu().numpy()
        head, kv, q = np.nonzero(table[:, :, 1:, 3])
        times, begun = table[head, kv, 1 + q], table[head, kv, 0]
        # The stamper may notice that a step is done a moment after the reducer, who cannot have been earlier.
        times = np.minimum.accumulate(times[:, ::-1], axis=1)[:, ::-1]
        times = times - times.min(initial=np.iinfo(np.int64).max)
        order = np.argsort(times[:, 0], kind="stable")
        columns = [begun[:, 1], begun[:, 0], head, kv, q, *times.T]
        names = ("sm", "ticket", "head", "kv", "q", "start", "wait", "added", "end")
        rows = np.stack(columns, axis=1)[order].tolist()
        tick = int(np.gcd.reduce(times, axis=None))
        meta = {"site": self.site, "number": self.number, "heads": self.heads, "tick": tick, **self.meta}
        return {"unit": "ns", "spans": [dict(zip(names, row, strict=True)) for row in rows], "meta": meta}


_lock = threading.Lock()  # backwards may run in several threads
_runs: list[ProfileRun] = []
_calls: Counter[Any] = Counter()
_names: Counter[str] = Counter()


def begin(
    site: str, key: object, heads: int, kv_tiles: int, q_tiles: int, device: torch.device, meta: Mapping[str, Any]
) -> ProfileRun | None:
    """Begin to record a call: the kernel fills `ProfileRun.table`, and `ProfileRun.end` comes after it.

    Args:
        key: a key that tells sites with the same name apart.
        heads: query heads of all batch elements.
        kv_tiles, q_tiles: of a head.

    Returns:
        None if this call is not to be recorded; a warning says so where the reason is lack of room or a CUDA graph.
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
    """The calls that were recorded since `clear_profile_runs`, oldest first."""
    with _lock:
        return tuple(_runs)


def clear_profile_runs() -> None:
    """Forget all recorded calls, written or not, and record the next `CALLS` calls of every site."""
    with _lock:
        _runs.clear()
        _calls.clear()
        _names.clear()


def write_profiles(folder: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """Write the recorded calls, a file ``SITE-NUMBER.json`` each, as `ProfileRun.to_dict` has them.

    Args:
        folder: made if it is not there; by default ``dash_inductor_profile/rankR`` where the variable RANK is set, else
            ``dash_inductor_profile/pidP``.

    Returns:
        The files, in the order of `profile_runs`.

    Raises:
        ArgumentError: `folder` is no path.
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
    """Write what has not been written yet, when the process ends."""
    rest = [run for run in profile_runs() if not run.written]
    for run in rest:
        _write(run, _default_folder())
    if rest:
        log.warning("the profiles of %s calls were written to %s", len(rest), _default_folder().absolute())


@functools.cache
def warn(text: str) -> None:
    """Log a warning, each text once in a process."""
    log.warning("%s", text)
