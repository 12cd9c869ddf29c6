"""Reads PyTorch's flight recorder and process groups, and makes the guard's own group."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dash_inductor.upstream import compat

from .group_names import OWN

_OPEN, _LATE = "open", "late"
_met: dict[str, list[int]] = {}  # ranks of the group of `meet`
_RECORDERS = "gloo", "nccl2", "nccl-lazy"
"""Names of recorders that differ from the names of backends; the guard's own group uses gloo."""
_MODULE, _NAMES = "torch._C._distributed_c10d", ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def is_up() -> bool:
    """Whether this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


def entries() -> list[dict[str, Any]]:
    """The latest collectives that this process has entered, in order of entry, as PyTorch's flight recorders have them.

    In torch 2.11 to 2.14, NCCL has a flight recorder of its own. From 2.15 on, each backend has one, which is read by
    the backend's name; that of "nccl" is "nccl2" by default. That of gloo has no completion times, but marks completed
    collectives (``retired``). The pickled form is not read.
    """
    if not is_up():
        return []
    found: dict[tuple[Any, ...], dict[str, Any]] = {}  # a version may have an entry in both
    for dump in _dumps():
        for entry in json.loads(dump).get("entries", []):
            if entry.get("process_group", [""])[0] == "":
                entry["process_group"] = [OWN, ""]
            group = tuple(entry["process_group"])
            found[group, entry.get("op_id"), entry.get("time_created_ns"), entry.get("profiling_name")] = entry
    return sorted(found.values(), key=lambda entry: int(entry.get("time_created_ns", 0)))


def _dumps() -> Iterator[bytes]:
    """The content of every flight recorder of this process, as JSON."""
    for name in _NAMES:
        try:
            dump = compat.resolve(_MODULE, name)
        except AttributeError:  # a build without it
            continue
        if "backend" in (dump.__doc__ or ""):
            for backend in sorted(_backends()):
                yield dump(True, False, backend)
        else:
            yield dump(True, False)


def _backends() -> set[str]:
    """The names under which backends of this process may record; a name that no backend has is an empty recorder.

    They are read from what the program asked for, without a call of the backends, which their own threads use.
    """
    found = set(_RECORDERS)
    for asked, _ in tuple(dist.distributed_c10d._world.pg_map.values()):  # such as "nccl" and "cpu:gloo,cuda:nccl"
        found.update(each.split(":")[-1] for each in asked.split(","))
    return found


def groups() -> dict[str, list[int]]:
    """The ranks of every process group of this process, by the group's name in the flight recorder (see `entries`)."""
    if not is_up():
        return {}
    world = dist.distributed_c10d._world
    return _met | {
        str(world.pg_names.get(group, group.group_name)): list(dist.get_process_group_ranks(group))
        for group in tuple(world.pg_map)
        if group is not None
    }


def device_uuid() -> str:
    """The UUID of the current GPU, "" if there is none or CUDA has not been initialized; starts no CUDA context."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return ""
    return str(getattr(torch.cuda.get_device_properties(), "uuid", ""))


class Board:
    """A shared set of words, to which any rank of a job can add and which all ranks can read, without waiting.

    Args:
        store: the store of the job, with a prefix.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def write(self, word: str) -> None:
        """Add a word to the shared set; does nothing if the job's store is gone."""
        with contextlib.suppress(Exception):
            self._store.set(word, "")

    def has(self, word: str) -> bool:
        """Whether any rank has added the word `word` to this board; False if the job's store is gone."""
        try:
            return bool(self._store.check([word]))
        except Exception:
            return False


class NotAllCame(Exception):
    """Raised if not all ranks came to a meeting in time; they can come to another one."""


def meet(name: str, settings: str, patience: float, timeout: timedelta) -> tuple[Any, Board | None, str]:
    """Connect all ranks of the job by gloo, with a process group that the program does not know.

    Each rank registers in the store of the job. The last one writes "open"; a rank that has waited too long, or finds
    other settings, writes the reason. The store keeps the first word, which holds for all ranks.

    Args:
        name: the name of this meeting, equal on all ranks.
        settings: must be equal on all ranks.
        patience: seconds to wait for the others.
        timeout: timeout of all collectives of the group.

    Returns:
        (group, board of its ranks, ""), or (None, None, why there is no group); the reason is "" if there is only one
        rank. The group works with `torch.distributed.all_gather`, and ends on all ranks when any rank drops its last
        reference to it.

    Raises:
        NotAllCame: a rank has waited too long for another one; all ranks that came get this error.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world < 2:
        return None, None, ""
    if not dist.is_gloo_available():
        return None, None, "this PyTorch has no gloo"
    c10d = dist.distributed_c10d
    try:
        store = compat.resolve("torch.distributed", "PrefixStore")(f"dash_guard/{name}", c10d._get_default_store())
        if store.compare_set("settings", "", settings).decode() != settings:
            store.compare_set("word", "", "the guards of ranks have different settings")
        if store.add("here", 1) == world:
            store.compare_set("word", "", _OPEN)
        deadline, pause = time.monotonic() + patience, 0.001
        while not store.check(["word"]):
            if time.monotonic() > deadline:
                store.compare_set("word", "", _LATE)
            time.sleep(pause)  # without the interpreter's lock, and without one of the store
            pause = min(2 * pause, 0.1)
        word = store.get("word").decode()
        if word == _LATE:
            raise NotAllCame
        if word != _OPEN:
            return None, None, word
        group = c10d.ProcessGroupGloo(store, rank, world, timeout=timeout)
    except NotAllCame:
        raise
    except Exception as error:
        return None, None, f"ranks cannot be connected: {error}"[:300]
    _met[OWN] = list(range(world))
    return group, Board(store), ""


def part() -> None:
    """Forget the ranks of the group that `meet` has made, so that `groups` no longer lists it."""
    _met.clear()
