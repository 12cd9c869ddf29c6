"""What PyTorch knows of the collectives of this process: its flight recorder, and its process groups."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from . import compat

_MODULE, _NAMES = "torch._C._distributed_c10d", ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def is_up() -> bool:
    """Whether this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


def entries() -> list[dict[str, Any]]:
    """Collectives that were entered lately, in the order of their entry, as the flight recorders of PyTorch have them.

    NCCL's is one of its own in torch 2.11; that of gloo has no times of completion, but tells what has completed
    (``retired``).  The other form, a pickle, is not read.
    """
    if not is_up():
        return []
    found: dict[tuple[Any, ...], dict[str, Any]] = {}  # a version may have an entry in both
    for name in _NAMES:
        try:
            dump = compat.resolve(_MODULE, name)
        except AttributeError:  # a build without it
            continue
        for entry in json.loads(dump(True, False)).get("entries", []):
            group = tuple(entry.get("process_group", ()))
            found[group, entry.get("op_id"), entry.get("time_created_ns"), entry.get("profiling_name")] = entry
    return sorted(found.values(), key=lambda entry: int(entry.get("time_created_ns", 0)))


def groups() -> dict[str, list[int]]:
    """The ranks of every process group that this process is in, by the name that `entries` calls it by."""
    if not is_up():
        return {}
    world = dist.distributed_c10d._world
    return {
        str(world.pg_names.get(group, group.group_name)): list(dist.get_process_group_ranks(group))
        for group in tuple(world.pg_map)
        if group is not None
    }


def device_uuid() -> str:
    """The UUID of the present GPU, "" without one; starts no CUDA context."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return ""
    return str(getattr(torch.cuda.get_device_properties(), "uuid", ""))
