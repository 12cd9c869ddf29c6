"""Programs in which a flag or a variable differs on one rank."""

from __future__ import annotations

import functools
import os

import torch
from torch.nn.parallel import DistributedDataParallel

from .job import Job, Program, network, set_and_back


def without_mkldnn(job: Job) -> None:
    """Another library multiplies matrices on one rank."""
    set_and_back(job, torch.backends.mkldnn, "enabled", not job.odd)


def low_precision(job: Job) -> None:
    """Matrices are multiplied in bfloat16 on one rank, where the processor can."""
    job.stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("medium" if job.odd else "highest")


def other_variable(job: Job) -> None:
    """A variable of a library differs, and so do the results that it gives."""
    if job.odd:
        job.stack.callback(os.environ.pop, "TORCH_SOME_LIBRARY", None)
        os.environ["TORCH_SOME_LIBRARY"] = "fast"
    without_mkldnn(job)


FLAGS = {"mkldnn": without_mkldnn, "precision": low_precision, "variable": other_variable}


def flagged(flag: str, job: Job, late: bool = False, compiled: bool = False) -> None:
    """A flag differs on one rank, from the beginning or from step 3 on."""

    def between(step: int) -> None:
        if step == (3 if late else 1):
            FLAGS[flag](job)

    model = network()
    if compiled:
        model.compile(backend="aot_eager")
    job.train(DistributedDataParallel(model), between)


PROGRAMS: dict[str, Program] = {
    **{f"flag {flag}": functools.partial(flagged, flag) for flag in FLAGS},
    "flag mkldnn late": functools.partial(flagged, "mkldnn", late=True),
    "flag precision late": functools.partial(flagged, "precision", late=True),
    "flag mkldnn compiled": functools.partial(flagged, "mkldnn", compiled=True),
}
