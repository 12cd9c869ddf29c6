"""Ranks of a job that are forks of one process, which has imported everything once."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing


def ranks(world: int, work: Callable[[int], None]) -> int:
    """Run `work` with the number of each rank; if one fails, the others are ended.

    Call it before any thread has started, on the CPU only.

    Returns:
        The exit status of the job: 0 if no rank has failed, else 1.
    """
    children: dict[int, int] = {}
    for rank in range(world):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children[child] = rank
    failed = False
    while children:
        child, status = os.wait()
        children.pop(child, None)
        if status and not failed:
            failed = True
            for other in children:
                os.kill(other, signal.SIGKILL)
    return int(failed)


def start(work: Callable[..., None], arguments: tuple[Any, ...], processes: int, device: str) -> None:
    """Run ``work(rank, *arguments)`` in processes, and wait for them; if one fails, so does this.

    They are forks, whose imports are those of this process, but for CUDA, which no fork can use.
    """
    method = "fork" if device == "cpu" else "spawn"
    torch.multiprocessing.start_processes(work, arguments, processes, start_method=method)  # type: ignore[no-untyped-call]
